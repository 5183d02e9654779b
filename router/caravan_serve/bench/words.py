"""Random words from a seed, so that a run can be repeated exactly and no two prompts share a prefix by accident."""

from random import Random

# Everyday words, each of which is one token in nearly every BPE vocabulary.
_TEXT = """
    able about above across action after again air all almost along already also always among animal answer apple area
    army around art autumn away back bad bank base beach bear beautiful bed before begin behind bell below best better
    between big bird black blue board boat body book both bottom box bread break bridge bright bring brother brown build
    burn business busy call camp capital care carry catch cause center chance change check child choose church circle
    city class clean clear climb clock close cloud coast cold color common complete cook cool copy corner cost cotton
    count country course cover cross crowd dance danger dark daughter day deep desert develop direct distance doctor
    door double down draw dream dress drive drop dry during early earth east easy edge electric else empty energy engine
    enough enter even evening every example eye face fact fall family famous farm fast father feel field fight figure
    fill find fine finger fire first fish floor flower follow food foot force forest form forward found fresh friend
    front fruit full game garden gate gentle glass gold good grand grass great green ground group grow guess half hand
    happy hard head hear heart heat heavy help high hill history hold home horse hospital hour house hundred ice idea
    inside island join journey just keep kind king kitchen knife know lake land language large last late laugh law lead
    learn leave left letter level light line listen little long machine market master matter measure meet middle mile
    milk mind minute money month moon morning mother mountain mouth move music name nation nature near night noise
    north note number ocean offer office often open orange order other paint paper parent part party pass past path
    pay people person picture piece place plain plan plant play point poor power press problem public pull question
    quick quiet rain reach ready reason record red rest rich ride right ring river road rock room round rule run safe
    sail salt same sand school science sea season second seed sell send sentence seven shape ship short silver simple
    sing sister size skin sleep slow small smile snow soft soil song south space speak spring square stand star start
    station step stone store story street strong student sugar summer sun surface table talk teacher test thing think
    time touch town track trade train travel tree true turn under valley village visit voice walk wall warm watch water
    weather week west wheel white wide wild wind window winter wish wood word work world write yard year yellow young
"""
ALL_WORDS = tuple(_TEXT.split())


def seeded(name: str) -> Random:
    """Return a random generator that depends only on ``name``."""
    return Random(name)  # noqa: S311 - must be repeatable, is not secret


def words(rng: Random, count: int) -> str:
    """Return ``count`` random words without punctuation."""
    return " ".join(rng.choices(ALL_WORDS, k=count))
