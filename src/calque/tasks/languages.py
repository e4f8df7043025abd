"""Names of languages: two letters where there are two (ISO 639-1), three elsewhere."""

from __future__ import annotations

# Where a macro-language has no data of its own, the code of the variety that stands for it.
_PAIRS = """
af afr  am amh  ar ara  az aze  be bel  bg bul  bn ben  br bre  bs bos  ca cat  cs ces  cy cym
da dan  de deu  el ell  en eng  eo epo  es spa  et est  eu eus  fa pes  fi fin  fo fao  fr fra
fy fry  ga gle  gd gla  gl glg  he heb  hi hin  hr hrv  hu hun  hy hye  ia ina  id ind  ie ile
io ido  is isl  it ita  ja jpn  jv jav  ka kat  kk kaz  km khm  ko kor  ku kur  kw cor  la lat
lt lit  lv lvs  mk mkd  ml mal  mn mon  mr mar  ms zsm  nl nld  nn nno  no nob  oc oci  pl pol
pt por  ro ron  ru rus  sk slk  sl slv  sq sqi  sr srp  sv swe  sw swh  ta tam  te tel  th tha
tk tuk  tl tgl  tr tur  tt tat  ug uig  uk ukr  ur urd  uz uzb  vi vie  xh xho  yi yid  zh cmn
"""
THREE_LETTERS: dict[str, str] = dict(zip(*[iter(_PAIRS.split())] * 2, strict=True))
TWO_LETTERS: dict[str, str] = {long: short for short, long in THREE_LETTERS.items()}


def short_name(language: str) -> str:
    """Give the name Calque reports a language under.

    >>> short_name("deu"), short_name("de"), short_name("ceb")
    ('de', 'de', 'ceb')
    """
    return TWO_LETTERS.get(language, language)


def long_name(language: str) -> str:
    """Give the three-letter code of a language.

    >>> long_name("zh"), long_name("ceb")
    ('cmn', 'ceb')
    """
    return THREE_LETTERS.get(language, language)
