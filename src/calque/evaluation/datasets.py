"""What is to be known of a dataset, and how its files are recognized.

The table of datasets, one entry each; licences as their sources state them.

The datasets that tasks read: look them up by name or by task. Nothing is ever downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from calque.errors import InputError


@dataclass(frozen=True, slots=True)
class FileKind:
    """Files of a dataset: a pattern of their path, and how they are read.

    The pattern is looked for in FOLDER/…/NAME; its groups `language` and `split` say what a file
    holds. `reader` names a function of `dataset_check`; a file without one belongs to
    another and is read with it.
    """

    pattern: str
    reader: str | None = None
    split: str = ""


@dataclass(frozen=True, slots=True)
class Dataset:
    """All there is to know of a dataset before it is used."""

    title: str
    about: str
    languages: str
    licence: str
    source: str
    citation: str
    layout: tuple[str, ...]
    tasks: tuple[str, ...]
    files: tuple[FileKind, ...]
    non_commercial: bool = False
    # What is missing when a folder has some of the set: these languages, these splits.
    expected: str = ""
    splits: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()


SEE_SOURCE = "see source"
PACKED = r"(?:\.(?:gz|xz|zst))?"
XTREME = "https://github.com/google-research/xtreme"


def _xtreme(folder: str, reader: str) -> tuple[FileKind, ...]:
    """Describe XTREME's `train-XX.tsv`, `dev-XX.tsv`, `test-XX.tsv` and translations of them."""
    name = rf"(?P<split>train|dev|test)-(?P<language>[a-z]{{2,3}})(?:\.tsv)?{PACKED}"
    translated = (
        rf"(?:train-|[a-z]{{2,3}}-)(?P<language>[a-z]{{2,3}})(?:-translated)?(?:\.tsv)?{PACKED}"
    )
    test = rf"(?:(?:dev|test)-)?(?P<language>[a-z]{{2,3}})[a-z-]*(?:\.tsv)?{PACKED}"
    return (
        FileKind(rf"/{folder}/translate-(?:train|test)/[a-z-]+\.txt{PACKED}"),
        FileKind(rf"/{folder}/translate-train/{translated}", reader, "translate-train"),
        FileKind(rf"/{folder}/translate-test/{test}", reader, "translate-test"),
        FileKind(rf"/{folder}/{name}", reader),
    )


NO_ANSWERS = "XTREME's download script blanks the tests' answers: take the source's own files."
NO_TEST_LABELS = "XTREME's test files carry no labels: the dev files are then the test."

DATASETS: dict[str, Dataset] = {
    "panx": Dataset(
        title="PAN-X (WikiANN), in XTREME's form",
        about="Names of persons, organizations and places in Wikipedia sentences, found by links.",
        languages="40 in XTREME, 282 in all",
        licence=f"{SEE_SOURCE} (its dataset card says unknown)",
        source=XTREME,
        citation="Pan et al., 2017, Cross-lingual name tagging and linking for 282 languages, ACL",
        layout=(
            "panx/train-en.tsv  word TAB tag, empty lines between sentences",
            "panx/dev-XX.tsv",
        ),
        tasks=("ner", "ner_probe"),
        files=_xtreme("panx", "names"),
        expected="af ar bg bn de el en es et eu fa fi fr he hi hu id it ja jv ka kk ko ml mr ms my "
        "nl pt ru sw ta te th tl tr ur vi yo zh",
        splits=("train", "dev"),
        cautions=("The labels are automatic: part of them is wrong.", NO_TEST_LABELS),
    ),
    "udpos": Dataset(
        title="Parts of speech of Universal Dependencies, in XTREME's form",
        about="Words with one of 17 universal parts of speech, from treebanks of version 2.",
        languages="33 to 38, by the version of XTREME",
        licence="each treebank's own, many of them CC BY-SA 4.0 and some non-commercial",
        source=XTREME,
        citation="Nivre et al., 2018, Universal Dependencies 2.2; Hu et al., 2020, XTREME",
        layout=(
            "udpos/train-en.tsv  word TAB tag, empty lines between sentences",
            "udpos/dev-XX.tsv",
        ),
        tasks=("pos", "pos_probe"),
        files=_xtreme("udpos", "tagged"),
        splits=("train", "dev"),
        cautions=(NO_TEST_LABELS, "Contractions are one word in XTREME's files, not in treebanks."),
    ),
    "ud": Dataset(
        title="Universal Dependencies treebanks",
        about="Sentences with parts of speech and dependency trees, checked by people.",
        languages="over 100",
        licence="each treebank's own: see the LICENSE file beside it",
        source="https://universaldependencies.org",
        citation="Nivre et al., 2020, Universal Dependencies v2, LREC",
        layout=(
            "ud/en_ewt-ud-train.conllu  CoNLL-U, under its own name",
            "ud/de_gsd-ud-test.conllu",
            "ud/UD_French-GSD/fr_gsd-ud-test.conllu  or in its own folder",
        ),
        tasks=("parsing", "pos", "pos_probe"),
        files=(
            FileKind(
                r"/(?P<language>[a-z]{2,3})(?:_\w+)?-ud-(?P<split>train|dev|test)[\w.-]*\.conllu"
                + PACKED,
                "trees",
            ),
        ),
        splits=("train", "test"),
        cautions=(
            "Treebanks of version 1 have other tags (CONJ is read as CCONJ) and relations.",
            "Treebanks differ in their conventions: compare models, not languages.",
        ),
    ),
    "xnli": Dataset(
        title="XNLI",
        about="Pairs of sentences: does the second follow from the first, or contradict it.",
        languages="15",
        licence="CC BY-NC 4.0",
        non_commercial=True,
        source="https://github.com/facebookresearch/XNLI",
        citation="Conneau et al., 2018, XNLI: Evaluating Cross-lingual Sentence …, EMNLP",
        layout=(
            "xnli/train-en.tsv  sentence TAB sentence TAB class",
            "xnli/dev-XX.tsv",
            "xnli/translate-train/  translations of the training set",
        ),
        tasks=("xnli",),
        files=_xtreme("xnli", "pairs"),
        expected="ar bg de el en es fr hi ru sw th tr ur vi zh",
        splits=("train", "dev"),
        cautions=(
            NO_TEST_LABELS,
            "Its sentences are parallel: do not align on them and test on them.",
        ),
    ),
    "pawsx": Dataset(
        title="PAWS-X",
        about="Pairs of sentences with the same words: paraphrases or not.",
        languages="7",
        licence="free for any purpose, with acknowledgement of Google",
        source="https://github.com/google-research-datasets/paws/tree/master/pawsx",
        citation="Yang et al., 2019, PAWS-X, EMNLP",
        layout=("pawsx/train-en.tsv  sentence TAB sentence TAB 0 or 1", "pawsx/dev-XX.tsv"),
        tasks=("pawsx",),
        files=_xtreme("pawsx", "pairs"),
        expected="de en es fr ja ko zh",
        splits=("train", "dev"),
        cautions=(
            NO_TEST_LABELS,
            "Training sets but the English one are by machine; a few dev sentences are NS.",
        ),
    ),
    "squad": Dataset(
        title="SQuAD 1.1",
        about="Questions on paragraphs of Wikipedia, each answered by a span: to learn from.",
        languages="English",
        licence="CC BY-SA 4.0",
        source="https://rajpurkar.github.io/SQuAD-explorer/",
        citation="Rajpurkar et al., 2016, SQuAD: 100,000+ Questions …, EMNLP",
        layout=("squad/train-v1.1.json", "squad/dev-v1.1.json"),
        tasks=("xquad", "mlqa"),
        files=(FileKind(rf"/squad/(?P<split>train|dev)-v1\.1\.json{PACKED}", "questions"),),
        splits=("train",),
    ),
    "xquad": Dataset(
        title="XQuAD",
        about="1,190 questions of SQuAD's dev set and their paragraphs, translated by people.",
        languages="12",
        licence="CC BY-SA 4.0",
        source="https://github.com/deepmind/xquad",
        citation="Artetxe, Ruder and Yogatama, 2020, On the Cross-lingual Transferability …, ACL",
        layout=("xquad/xquad.XX.json  SQuAD's JSON",),
        tasks=("xquad",),
        files=(FileKind(rf"/xquad\.(?P<language>[a-z]+)\.json{PACKED}", "questions", "test"),),
        expected="ar de el en es hi ro ru th tr vi zh",
        splits=("test",),
        cautions=("Do not learn from SQuAD's dev set: these are its translations.", NO_ANSWERS),
    ),
    "mlqa": Dataset(
        title="MLQA",
        about="Questions on paragraphs of Wikipedia, parallel between four languages on average.",
        languages="7",
        licence="CC BY-SA 3.0",
        source="https://github.com/facebookresearch/MLQA",
        citation="Lewis et al., 2020, MLQA: Evaluating Cross-lingual Extractive …, ACL",
        layout=("mlqa/test-context-XX-question-XX.json", "mlqa/dev-context-XX-question-XX.json"),
        tasks=("mlqa",),
        files=(
            FileKind(
                r"/(?P<split>dev|test)-context-(?P<language>[a-z]+)-question-(?P=language)\.json"
                + PACKED,
                "questions",
            ),
            FileKind(rf"/(?:dev|test)-context-[a-z]+-question-[a-z]+\.json{PACKED}"),
        ),
        expected="ar de en es hi vi zh",
        splits=("test",),
        cautions=(NO_ANSWERS,),
    ),
    "tydiqa": Dataset(
        title="TyDiQA-GoldP",
        about="Questions that people asked in their own language, on paragraphs that answer them.",
        languages="9",
        licence="Apache 2.0",
        source="https://github.com/google-research-datasets/tydiqa",
        citation="Clark et al., 2020, TyDi QA, TACL",
        layout=(
            "tydiqa/tydiqa.goldp.XX.train.json  SQuAD's JSON",
            "tydiqa/tydiqa.goldp.XX.dev.json",
        ),
        tasks=("tydiqa", "xquad", "mlqa"),
        files=(
            FileKind(
                rf"/tydiqa\.goldp\.(?P<language>[a-z]+)\.(?P<split>train|dev)\.json{PACKED}",
                "questions",
            ),
        ),
        expected="ar bn en fi id ko ru sw te",
        splits=("train", "dev"),
        cautions=("Not parallel: languages differ in topic and difficulty.",),
    ),
    "bucc2018": Dataset(
        title="BUCC 2018 shared task",
        about="Two texts, mostly of Wikipedia, with a few translations hidden: find them.",
        languages="4 with English",
        licence=SEE_SOURCE,
        source="https://comparable.limsi.fr/bucc2018/bucc2018-task.html",
        citation="Zweigenbaum, Sharoff and Rapp, 2018, Overview of the Third BUCC Shared Task",
        layout=(
            "bucc2018/zh-en.dev.zh  id TAB sentence",
            "bucc2018/zh-en.dev.en",
            "bucc2018/zh-en.dev.gold  id TAB id",
            "bucc2018/zh-en/zh-en.training.gold  or in the organizers' folders and names",
        ),
        tasks=("bucc",),
        files=(
            FileKind(
                r"/(?P<language>[a-z]{2,3})-en\.(?P<split>test|training|dev|sample)\.gold" + PACKED,
                "mining",
            ),
            FileKind(rf"/[a-z]{{2,3}}-en\.(?:test|training|dev|sample)\.[a-z]{{2,3}}{PACKED}"),
        ),
        expected="de fr ru zh",
        cautions=(
            "XTREME's dev is the organizers' sample, its test their training set without gold.",
            "With one split the threshold comes from one half of the sentences for the other.",
        ),
    ),
    "tatoeba": Dataset(
        title="Tatoeba test set of LASER",
        about="Up to 1,000 everyday sentences and their English translations: find each one's.",
        languages="112 with English",
        licence="CC BY 2.0 FR (terms of use of tatoeba.org)",
        source="https://github.com/facebookresearch/LASER/tree/main/data/tatoeba/v1",
        citation="Artetxe and Schwenk, 2019, Massively Multilingual Sentence Embeddings …, TACL",
        layout=("tatoeba/tatoeba.deu-eng.deu", "tatoeba/tatoeba.deu-eng.eng"),
        tasks=("tatoeba",),
        files=(
            FileKind(r"/tatoeba\.[a-z_]+-eng\.eng"),
            FileKind(r"/tatoeba\.(?P<language>[a-z_]+)-eng\.(?P=language)", "tatoeba", "test"),
        ),
        cautions=(
            "The English sentences differ by language: accuracies of languages do not compare.",
            "Tatoeba is in much training bitext: leave these sentences out of it.",
            "XTREME's own copy has its lines shuffled and no answers; take LASER's.",
        ),
    ),
    "muse": Dataset(
        title="MUSE dictionaries",
        about="Translations of frequent words, 5,000 to learn from and 1,500 to test.",
        languages="110 pairs",
        licence=f"non-commercial; {SEE_SOURCE} (LICENSE of the repository)",
        non_commercial=True,
        source="https://github.com/facebookresearch/MUSE",
        citation="Conneau et al., 2018, Word Translation without Parallel Data, ICLR",
        layout=("muse/en-de.0-5000.txt  source target", "muse/en-de.5000-6500.txt"),
        tasks=("lexicon_induction",),
        files=(
            FileKind(
                rf"/(?P<language>[a-z]{{2}}-[a-z]{{2}})\.0-5000\.txt{PACKED}", "entries", "train"
            ),
            FileKind(
                rf"/(?P<language>[a-z]{{2}}-[a-z]{{2}})\.5000-6500\.txt{PACKED}", "entries", "test"
            ),
        ),
        splits=("test",),
        cautions=(
            "Made by a translation tool: names and numbers are many, and some entries wrong.",
        ),
    ),
    "semeval2017": Dataset(
        title="SemEval-2017 Task 2",
        about="Pairs of words of one language or two, with how similar people find them.",
        languages="de en es fa it",
        licence=SEE_SOURCE,
        source="http://alt.qcri.org/semeval2017/task2/",
        citation="Camacho-Collados et al., 2017, SemEval-2017 Task 2, SemEval",
        layout=(
            "word_similarity/semeval17_mono/english.txt  word TAB word TAB number",
            "word_similarity/semeval17_cross/de-es.txt",
        ),
        tasks=("word_similarity",),
        files=(FileKind(r"/semeval17_\w+/(?P<language>[a-z-]+)\.txt", "similarities", "test"),),
    ),
    "rg65": Dataset(
        title="RG-65, cross-lingual",
        about="Rubenstein and Goodenough's pairs of nouns between languages, with similarities.",
        languages="de en es fa fr pt",
        licence=SEE_SOURCE,
        source="http://lcl.uniroma1.it/similarity-datasets/",
        citation="Camacho-Collados, Pilehvar and Navigli, 2015, A Framework for …, ACL",
        layout=("word_similarity/rg65_cross/rg65_EN-DE.txt  word TAB word TAB number",),
        tasks=("word_similarity",),
        files=(FileKind(r"/rg65_(?P<language>[A-Z]{2}-[A-Z]{2})\.txt", "similarities", "test"),),
        cautions=("Some 100 pairs a file: differences of a few points mean little.",),
    ),
    "gold_alignments": Dataset(
        title="Word alignments made by people",
        about="Sentence pairs with links between words, sure ones and possible ones.",
        languages="en-fr (WPT 2003), ro-en and en-hi (WPT 2005), ja-en (KFTT), de-en (Biçici), "
        "en-cs (CzEnAli)",
        licence=f"{SEE_SOURCE}, each set's own; released for research",
        source="https://aclanthology.org/W03-0301 https://aclanthology.org/W05-0809 "
        "http://www.phontron.com/kftt https://aclanthology.org/L06-1158",
        citation="Mihalcea and Pedersen, 2003; Martin et al., 2005; Neubig, 2011; Biçici, 2011; "
        "Bojar and Prokopová, 2006",
        layout=(
            "gold_alignments/en-fr.text  source ||| target, words apart",
            "gold_alignments/en-fr.gold  i-j sure, ipj possible, from 0",
        ),
        tasks=("word_alignment",),
        files=(
            FileKind(r"/(?P<language>[a-z]{2,3}-[a-z]{2,3})\.gold", "links", "test"),
            FileKind(r"/[a-z]{2,3}-[a-z]{2,3}\.text"),
        ),
        cautions=(
            "Only English–French tells possible links from sure ones: error rates do not compare.",
        ),
    ),
    "cls": Dataset(
        title="Webis-CLS-10: reviews of products at Amazon",
        about="Reviews of books, films and music, good or bad by their stars.",
        languages="de en fr ja",
        licence=SEE_SOURCE,
        source="http://www.uni-weimar.de/medien/webis/research/corpora/webis-cls-10/",
        citation="Prettenhofer and Stein, 2010, Cross-Language Text Classification …, ACL",
        layout=(
            "cls-acl10-unprocessed/de/books/train.review  XML",
            "cls-acl10-unprocessed/de/books/test.review",
        ),
        tasks=("reviews",),
        files=(
            FileKind(
                rf"/(?P<language>[a-z]{{2}})/(?:books|dvd|music)/(?P<split>train|test)\.review{PACKED}",
                "reviews",
            ),
            FileKind(rf"/(?:books|dvd|music)/unlabeled\.review{PACKED}"),
            FileKind(r"/trans/.*/test\.review" + PACKED),
        ),
        splits=("train", "test"),
        cautions=("Reviews of three stars are left out, and counted.",),
    ),
    "multi30k": Dataset(
        title="Multi30k",
        about="Captions of pictures, translated: 29,000 pairs to learn from, and small tests.",
        languages="cs de en fr",
        licence=SEE_SOURCE,
        source="https://github.com/multi30k/dataset",
        citation="Elliott et al., 2016, Multi30K: Multilingual English-German Image …, VL",
        layout=(
            "translation/multi30k/train.en",
            "translation/multi30k/train.de",
            "translation/multi30k/test_2016_flickr.en",
        ),
        tasks=("multi30k",),
        files=(
            FileKind(
                r"/multi30k/(?P<split>train|val|test_\w+)\.(?P<language>[a-z]{2})" + PACKED, "lines"
            ),
        ),
        cautions=("Short, simple captions: figures here say little of other text.",),
    ),
    "wmt14": Dataset(
        title="newstest2014 of WMT14",
        about="News sentences and their translations, the test of most papers on translation.",
        languages="de en (others at the source)",
        licence=SEE_SOURCE,
        source="http://statmt.org/wmt14/translation-task.html",
        citation="Bojar et al., 2014, Findings of the 2014 Workshop on SMT",
        layout=("translation/newstest2014.de", "translation/newstest2014.en"),
        tasks=("translation",),
        files=(FileKind(rf"/(?P<split>newstest2014)\.(?P<language>[a-z]{{2}}){PACKED}", "lines"),),
    ),
}


def find_dataset(name: str) -> Dataset:
    """Look up a dataset; an unknown one is an error."""
    if name not in DATASETS:
        raise InputError(
            f"no dataset is called {name!r}", fix=f"choose from: {', '.join(DATASETS)}"
        )
    return DATASETS[name]


def datasets_of(tasks: list[str]) -> dict[str, Dataset]:
    """List the datasets that tasks read; a task without one is an error."""
    with_data = sorted({task for dataset in DATASETS.values() for task in dataset.tasks})
    for task in tasks:
        if task not in with_data:
            raise InputError(
                f"no dataset of task {task!r}", fix=f"choose from: {', '.join(with_data)}"
            )
    return {
        name: found for name, found in DATASETS.items() if not set(found.tasks).isdisjoint(tasks)
    }
