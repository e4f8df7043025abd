"""What the campaign tries: a new format, command or phase is one line of a table."""

# ruff: noqa: E501 - one line per row
# fmt: off

from __future__ import annotations

from dataclasses import dataclass

MODEL = "--model in/model"
# What decides the amount of work: a recipe that asks for a billion steps is valid.
FEW = " ".join(
    f"--set {setting}" for setting in (
        "schedule.steps=2", "schedule.warmup=1", "checkpoints.validation_batches=1", "model.layers=2",
        "model.hidden=32", "model.heads=2", "model.intermediate=64", "model.positions=64",
        "engine.accumulation=1", "engine.workers=0", "engine.compile=false", "data.max_length=64",
    )
)
SCORES = "--set epochs=1 --set batch_tokens=512 --seeds 1 -o out/scores.jsonl --data in/data"



@dataclass(frozen=True)
class Format:
    """Files to change and the command that reads them.

    Attributes:
        name: Row of the table.
        files: Patterns of files below in/, or below out/ if an output is continued.
        command: Arguments of `calque`.
        continued: An unfinished output in in/, which is copied to out/.
        is_checked: Whether every change must be noticed or without effect.
    """

    name: str
    files: str
    command: str
    continued: str = ""
    is_checked: bool = False


FORMATS = (
    Format("bitext, tsv", "en-de.tsv", "clean in/en-de.tsv -o out/clean.tsv --report out/r.json"),
    Format("bitext, tsv", "en-de.tsv", "links in/en-de.tsv -o out/linked"),
    Format("bitext, pipes", "words.txt", f"align in/words.txt -o out/links {MODEL}"),
    Format("bitext, pipes", "words.txt", f"align in/words.txt -o out/links --skip-bad out/bad {MODEL}"),
    Format("bitext, two sides", "news.de", f"align in/news.en in/news.de -o out/links {MODEL}"),
    Format("bitext, .gz", "words.txt.gz", f"align in/words.txt.gz -o out/links {MODEL}"),
    Format("bitext, .xz", "words.txt.xz", f"align in/words.txt.xz -o out/links.xz {MODEL}"),
    Format("bitext, .zst", "words.txt.zst", f"align in/words.txt.zst -o out/links.zst {MODEL}"),
    Format("text", "news.en", f"embed in/news.en -o out/en.npy {MODEL}"),
    Format("text", "news.en", f"mine in/news.en in/news.de -o out/mined.tsv {MODEL}"),
    Format("text", "en.txt", f"extract in/en.txt -o out/en.vec --language en --no-filter --min-count 1 --epochs 1 {MODEL}"),
    Format("text", "en.txt de.txt", "neutralize in/model in/en.txt in/de.txt -o out/neutral --sentences 50"),
    Format("text", "news.en", "translate in/translator/model in/news.en -o out/de.txt --beams 1 --tgt-lang de"),
    Format("links", "en-de.links", "links in/words.txt --links in/en-de.links --languages en-de -o out/linked"),
    Format("links", "linked.*", "train in/maps.yaml -o out/maps"),
    Format("gold links", "data/gold_alignments/de-en.*", f"align in/data/gold_alignments/de-en.text --gold in/data/gold_alignments/de-en.gold {MODEL}"),
    Format("gold links", "data/gold_alignments/*.gold", "data check in/data --tasks word_alignment"),
    Format("dictionary", "en-de.dict", "map in/en.vec in/de.vec -o out/mapped --method procrustes --dictionary in/en-de.dict"),
    Format("dictionary", "en-de.dict", "lexicon in/en.vec in/de.vec -o out/x.tsv --evaluate in/en-de.dict"),
    Format("dictionary", "en-de.dict", "grow in/model --tokenizer in/translator/model -o out/grown --dictionary in/en-de.dict"),
    Format("word2vec text", "de.vec", "lexicon in/en.vec in/de.vec -o out/x.tsv"),
    Format("word2vec text", "en.vec", "map in/en.vec in/de.vec -o out/mapped"),
    Format("word2vec binary", "de.bin", "lexicon in/en.bin in/de.bin -o out/x.tsv"),
    Format(".npy vectors", "de.npy", "mine in/en.npy in/de.npy -o out/mined.tsv"),
    Format(".npy vectors", "en.npy", "mine in/news.en in/news.de --vectors in/en.npy in/de.npy -o out/mined.tsv"),
    Format("CoNLL-U", "data/ud/*.conllu*", "data check in/data --tasks parsing"),
    Format("CoNLL-U", "data/ud/fr* data/ud/en*train*", f"evaluate in/model --tasks parsing --languages fr {SCORES}"),
    Format("SQuAD JSON", "data/xquad/*.json data/mlqa/*.json data/tydiqa/*.json*", "data check in/data --tasks xquad,mlqa,tydiqa"),
    Format("SQuAD JSON", "data/xquad/xquad.de.json", f"evaluate in/model --tasks xquad --languages de {SCORES}"),
    Format("XTREME tsv", "data/panx/*.tsv data/udpos/*.tsv data/xnli/*.tsv data/pawsx/*.tsv", "data check in/data --tasks ner,pos,xnli,pawsx"),
    Format("XTREME tsv", "data/panx/dev-de.tsv data/panx/train-en.tsv", f"evaluate in/model --tasks ner_probe --languages de {SCORES}"),
    Format("review XML", "data/cls/*/*/*.review", "data check in/data --tasks reviews"),
    Format("BUCC, Tatoeba", "data/bucc2018/* data/tatoeba/*", "data check in/data --tasks bucc,tatoeba"),
    Format("BUCC, Tatoeba", "data/bucc2018/* data/tatoeba/*", f"evaluate in/model --tasks bucc,tatoeba --languages de {SCORES}"),
    Format("word lists", "data/muse/* data/word_similarity/*/* vectors/*", f"evaluate in/vectors --tasks lexicon_induction,word_similarity {SCORES}"),
    Format("recipe YAML", "recipe.yaml", f"prepare in/recipe.yaml -o out/prepared --workers 1 {FEW}"),
    Format("recipe YAML", "recipe.yaml", f"train in/recipe.yaml -o out/run --prepared in/prepared {FEW}"),
    Format("recipe YAML", "translate.yaml", f"train in/translate.yaml -o out/run --prepared in/prepared {FEW}"),
    Format("model folder", "model/*", f"embed in/news.en -o out/en.npy {MODEL}"),
    Format("model folder", "model/*", f"align in/words.txt -o out/links {MODEL}"),
    Format("model folder", "model/*", "train in/maps.yaml -o out/maps"),
    Format("model folder", "translator/model/*", "translate in/translator/model in/news.en -o out/de.txt --beams 1 --tgt-lang de"),
    Format("model folder", "neutral/*", "embed in/news.en -o out/en.npy --model in/neutral"),
    Format("model index", "sharded/*index.json sharded/*.safetensors", "embed in/news.en -o out/en.npy --model in/sharded"),
    Format("map folder", "maps/model/maps.*", f"align in/words.txt -o out/links --layer 1 --languages en-de --maps in/maps/model {MODEL}"),
    Format("statistics", "statistics/*", "align in/words.txt -o out/links --aligner fast-align --load in/statistics", is_checked=True),
    Format("prepared text", "prepared/*.json prepared/*/*", "train in/recipe.yaml -o out/run --prepared in/prepared"),
    Format("prepared text", "prepared/*.json prepared/*/*", "prepare in/recipe.yaml -o out/prepared --workers 1", "prepared"),
    Format("checkpoint", "half-run/*.json half-run/*/*", "train in/recipe.yaml -o out/half-run --prepared in/prepared --resume", "half-run", is_checked=True),
    Format("metrics", "half-run/metrics.jsonl", "train in/recipe.yaml -o out/half-run --prepared in/prepared --resume", "half-run"),
    Format(".partial of align", "half.links.partial/*", f"align in/words.txt -o out/half.links --resume {MODEL}", "half.links.partial", is_checked=True),
    Format(".partial of translate", "half.de.partial/*", "translate in/translator/model in/news.en -o out/half.de --beams 1 --tgt-lang de --resume", "half.de.partial", is_checked=True),
    Format(".partial of extract", "half.vec.partial/*", f"extract in/en.txt -o out/half.vec --language en --no-filter --min-count 1 --epochs 2 --resume {MODEL}", "half.vec.partial", is_checked=True),
    Format(".mining of mine", "half.tsv.mining/*", f"mine in/news.en in/news.de -o out/half.tsv --resume {MODEL}", "half.tsv.mining", is_checked=True),
    Format("results", "scores/results.jsonl scores/items/*", "compare in/scores --baseline random:calque-mini --bootstrap 100 -o out/r.html -o out/r.csv"),
    Format("results", "results/results.jsonl", "evaluate in/model --data in/data --languages de --tasks tatoeba,word_alignment --jobs 0 -o out/results", "results"),
)


@dataclass(frozen=True)
class Command:
    """A command that is killed, interrupted, run twice at a time and run on a full disk.

    Attributes:
        name: Row of the table.
        arguments: Arguments of `calque`; all output goes to out/.
    """

    name: str
    arguments: str


COMMANDS = (
    Command("train", "train in/recipe.yaml -o out/run --prepared in/prepared"),
    Command("train from text", "train in/recipe.yaml -o out/run"),
    Command("prepare", "prepare in/recipe.yaml -o out/prepared --workers 1"),
    Command("prepare, 2 workers", "prepare in/tokenizer.yaml -o out/prepared --workers 2"),
    Command("align", f"align in/big.txt -o out/links {MODEL}"),
    Command("align, .gz", f"align in/big.txt -o out/links.gz --scores {MODEL}"),
    Command("extract", f"extract in/big.en -o out/en.vec --language en --no-filter --min-count 2 --epochs 3 {MODEL}"),
    Command("mine", f"mine in/big.en in/big.de -o out/mined.tsv {MODEL}"),
    Command("embed", f"embed in/big.en -o out/en.npy {MODEL}"),
    Command("links", "links in/big.txt --languages en-de -o out/linked"),
    Command("translate", "translate in/translator/model in/news.en -o out/de.txt --beams 1 --tgt-lang de"),
    Command("evaluate", "evaluate in/model --data in/data --tasks tatoeba,word_alignment,parsing --languages de --set epochs=1 --seeds 2 --jobs 0 -o out/results"),
    Command("evaluate, 2 jobs", "evaluate in/model --data in/data --tasks tatoeba,ner --languages de --set epochs=1 --seeds 2 --jobs 2 -o out/results"),
    Command("map", "map in/en.vec in/de.vec -o out/mapped"),
    Command("neutralize", "neutralize in/model in/en.txt in/de.txt -o out/neutral --sentences 50"),
    Command("grow", "grow in/model --tokenizer in/translator/model -o out/grown --dictionary in/en-de.dict"),
)
# Compiling takes a minute, so that such a run is interrupted only, and not finished.
COMPILED = Command("train, compiled", "train in/recipe.yaml -o out/run --prepared in/prepared --set engine.compile=true")
# Phases in which signals arrive: command, function whose call starts the phase, and up to which call.
PHASES: dict[str, tuple[str, str, int]] = {
    "reading pairs": ("align", "calque.word_alignment.file_job:read_pairs", 1),
    "loading a model": ("align", "calque.models.inference:load_encoder", 1),
    "aligning": ("align", "calque.io.resumable:JournaledFile.append", 20),
    "training a tokenizer": ("prepare, 2 workers", "calque.training.sources:train_tokenizer_on_sources", 1),
    "preparing": ("prepare", "calque.training.sources:prepare_corpora", 1),
    "preparing, 2 workers": ("prepare, 2 workers", "calque.training.sources:prepare_corpora", 1),
    "training": ("train", "calque.training.loop:Trainer.take_step", 6),
    "compiling": ("train, compiled", "calque.training.loop:Trainer.take_step", 1),
    "validating": ("train", "calque.training.loop:compute_validation_losses", 3),
    "saving": ("train", "calque.training.run:Run.save", 3),
    "finishing": ("train", "calque.training.run:Run.finish", 1),
    "evaluating": ("evaluate", "calque.evaluation.grid.runner:Runner.run", 4),
    "evaluating, 2 jobs": ("evaluate, 2 jobs", "calque.evaluation.grid.run_grid:receive_from", 20),
    "reading a corpus": ("extract", "calque.vectors.extract:number_corpus", 1),
    "extracting": ("extract", "calque.vectors.x2static:X2StaticLearner.update", 12),
    "embedding for mine": ("mine", "calque.sentences.mine:_embed_sides", 1),
    "mining": ("mine", "calque.sentences.mine:_search", 1),
    "embedding": ("embed", "calque.sentences.embed:embed_blocks", 1),
    "linking": ("links", "calque.word_alignment.linked_bitext:link_bitext", 1),
    "translating": ("translate", "calque.io.resumable:JournaledFile.append", 4),
    "mapping": ("map", "calque.vectors.mapping:map_vectors", 1),
}
# Written by Calque into in/: arguments, in order.
WRITTEN = (
    "embed in/news.en -o in/en.npy --model in/model",
    "embed in/news.de -o in/de.npy --model in/model",
    "align in/words.txt -o in/en-de.links --model in/model",
    "links in/words.txt --tokenized --languages en-de -o in/linked-folder",
    "align in/words.txt -o in/saved.links --aligner fast-align --save in/statistics",
    "neutralize in/model in/en.txt in/de.txt -o in/neutral --sentences 50",
    "map in/en.vec in/de.vec -o in/mapped --method procrustes --dictionary in/en-de.dict",
    "prepare in/recipe.yaml -o in/prepared --workers 1",
    "train in/translate.yaml -o in/translator --prepared in/prepared",
    "train in/maps.yaml -o in/maps",
    "train in/recipe.yaml -o in/trained --prepared in/prepared",
    "evaluate in/model --data in/data --languages de --tasks tatoeba,word_alignment -o in/results",
)
# Interrupted in the middle: arguments, the function that ends the process, and at which call.
INTERRUPTED = (
    ("align in/words.txt -o in/half.links --model in/model", "calque.io.resumable:JournaledFile.append", 3),
    ("translate in/translator/model in/news.en -o in/half.de --beams 1 --tgt-lang de", "calque.io.resumable:JournaledFile.append", 3),
    ("mine in/news.en in/news.de -o in/half.tsv --model in/model", "calque.sentences.mine:_search", 1),
    ("extract in/en.txt -o in/half.vec --language en --no-filter --min-count 1 --epochs 2 --model in/model", "calque.vectors.x2static:X2StaticLearner.update", 3),
    ("train in/recipe.yaml -o in/half-run --prepared in/prepared", "calque.training.loop:Trainer.take_step", 6),
)
