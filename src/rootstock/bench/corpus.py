"""Seeded English-like text for the training of the demo's tokenizer and for workloads.

Sentences come from a small grammar over the word lists below. They mean little, but they have words of usual
lengths, punctuation, numbers, code and tables, and need no download.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words("""
account address agent alarm answer apple archive argument array arrow article author autumn balance barrel
basket batch beam bed bench bill bird blade block board boat book border bottle branch brick bridge broker
brush bucket budget buffer bulb button cabin cable cache calendar camera candle canvas carbon card carrier
cart case catalogue cause cedar cell centre chain chair channel chapter chart chest child chord circle city
claim class clay client cliff clock cloth cloud coast coat code coin column comma command comment company
compass copper copy corner cotton counter country course cover craft cream creek crop crowd crystal cube
cupboard current curve customer cycle damage dancer database date daughter dawn deal decade degree delta
demand depth desert design desk detail device diary dinner direction discount distance doctor document dollar
door draft drawer dream driver drop dust eagle east echo edge editor effect effort elbow element engine entry
envelope error estimate evening event example exit expert export eye fabric factor factory failure family
farmer feather fence field figure file filter finger fire flag flame flight floor flower folder forest fork
form formula fortune frame friend frost fruit function future garden gate gauge gesture giant gift glacier
glass glove goal grain graph grass gravel greenhouse grid ground group guard guest guide hammer handle harbour
harvest hat header health heart hedge height helmet hill history hook horizon horse host hour house idea image
impact income index industry ink inspector instrument interval invoice island item jacket job journal journey
judge juice key kettle kitchen knife label ladder lake lamp language lantern layer leader leaf league leather
lecture leg lemon lens letter level library licence light limit line link lion list loan lock loop lumber
machine magnet mail manager manual map marble margin market mast match matter meadow meal measure medal
meeting member memory menu message metal meter method middle mile milk mill mind mineral minute mirror mission
mistake mixture model module moment monitor month moon morning motor mountain mouth movie museum music nail
name neck needle nest network night node noise north notebook notice number nurse oak object ocean offer
office oil onion opinion orchard order organ origin output oven owner package page paint pair palace panel
paper parcel parent park parser part party passage patch path patient pattern payment peak pencil people
pepper period person phase phone photo phrase piano picture piece pilot pin pipe pitch plain plan planet plant
plate platform player plum pocket poem point policy pond pool port position post pot potato powder power
prefix present pressure price prince printer prize problem process product profit program project proof
property protocol pump purpose quarter query question queue rail rain range rate reader reason receipt recipe
record region relation remedy rent repair reply report request reserve result reward ribbon rice ring river
road robot rock roof room root rope rose route row rule runner sail sailor salad salt sample sand scale scene
schedule school science scope score screen script sea season seat second secret section sector seed segment
sensor sentence series server service session shadow shape share sheep sheet shelf shell shield ship shop
shore shoulder side signal silk silver sister site size skin sky slope smoke snow soil soldier solution song
source south space spark speaker speech speed spring square stage stair stamp standard star state station
statue steam steel step stock stone storage store storm story stove stranger straw stream street string
student studio style subject sugar summer sun supply support surface symbol system table tail talent tank
target task taste teacher team template tenant tension term test text theory thread ticket tide timber time
tin token tone tool tooth topic tower town trace track trade train travel tray tree trend trial trip truck
trunk truth tunnel turn twig type uncle unit update user valley value valve van vector vehicle version vessel
village vine visit voice volume voyage wagon wall warden watch water wave weather web week weight west wheat
wheel wind window wine winter wire witness wood wool word work worker world yard year zone
""")

VERBS = _words("""
accept add adjust admit answer appear apply arrange arrive ask assign attach avoid balance become begin belong
bind borrow break bring build call cancel carry catch cause change charge check choose claim clean clear climb
close collect combine compare complete compute confirm connect consider contain continue control convert copy
correct cost count cover create cross cut decide declare define delay deliver depend describe design destroy
detect develop discuss divide draw drive drop earn edit empty enable encourage enter escape estimate examine
exchange expand expect explain explore express extend fail fall fasten feed fetch fill find finish fit fix
float follow force forget form free gather generate get give grow guess handle hang happen help hide hold hope
hurry identify ignore imagine improve include increase inform insert inspect install invite join jump keep
kick know land last lay lead learn leave lend lift limit listen load lock look lose maintain make manage mark
match measure meet melt mend mention merge miss mix move name need note notice obey observe obtain offer open
operate order paint pass paste pause pay perform permit pick place plan plant play point pour prepare present
press prevent print produce promise protect prove provide publish pull push put query raise reach read receive
recognise record reduce refer refuse release remain remember remove rename repair repeat replace reply report
require rescue reserve resolve respond rest restart restore return review ride rise roll run save say scan
search see seem select sell send separate serve settle shake share ship show shut sign skip sleep solve sort
speak spend split spread stand start stay steer stop store strike study submit suggest supply support suppose
surround swim switch take talk teach tear tell test thank think throw tie touch trace trade train transfer
translate travel treat trust try turn understand unload update use validate visit wait walk want warn wash
watch wear weigh win wish wonder work wrap write yield
""")

ADJECTIVES = _words("""
able ancient angry average awake bad bitter blank blind bold brave brief bright broad broken calm careful
cheap clean clear clever cold common complete cool correct curious dark deep different dirty distant double
dry dull eager early easy empty equal exact extra fair false famous fast final fine firm flat fresh full
general gentle golden good grand great green grey happy hard heavy high hollow honest hot huge idle important
inner large late lazy light likely local long loose loud low lucky main many minor missing modern narrow near
neat new nice normal odd old open ordinary other outer pale partial patient perfect plain pleasant polite poor
possible previous private proper proud public pure quick quiet random rare ready real recent red regular
remote rich right rough round sad safe same second secret serious shallow sharp short shy silent similar
simple single slow small smooth soft solid special stable stale steady steep straight strange strict strong
sudden sweet tall tame thick thin third tidy tight tiny total true typical unique unusual useful usual valid
vast violent visible warm weak wet white whole wide wild wise wooden wrong yellow young
""")

ADVERBS = _words("""
again almost already always carefully certainly daily early elsewhere enough finally gently gladly here indeed
later mostly nearly never now often once only perhaps quickly quietly rarely seldom simply slowly sometimes
soon still suddenly then there together today tomorrow tonight usually well yesterday
""")

PREPOSITIONS = _words("""
about above across after against along among around at before behind below beside between beyond by for from
in inside into near of off on onto over past since through to toward under until up upon with without
""")
LINKS = _words("and but so because although while when if unless until since whereas")
OPENERS = [
    "However,",
    "In short,",
    "At first,",
    "As before,",
    "For example,",
    "On the whole,",
    "By then",
    "Even so,",
]


def sentences(rng: random.Random) -> Iterator[str]:
    """Yields sentences without end."""
    while True:
        yield _sentence(rng)


def paragraph(rng: random.Random, words: int) -> str:
    """Returns whole sentences, at least one, of about `words` words together."""
    parts: list[str] = []
    for sentence in sentences(rng):
        parts.append(sentence)
        if sum(part.count(" ") + 1 for part in parts) >= words:
            return " ".join(parts)
    raise AssertionError("sentences() ended")


def document(seed: int, lines: int) -> list[str]:
    """Returns lines of prose, code, tables and JSON, a tokenizer's training text."""
    rng = random.Random(seed)
    kinds = (lambda: paragraph(rng, 40), lambda: _code(rng), lambda: _row(rng), lambda: _json(rng))
    return [rng.choices(kinds, weights=(12, 3, 2, 2))[0]() for _ in range(lines)]


def _sentence(rng: random.Random) -> str:
    clause = _clause(rng)
    if rng.random() < 0.35:
        clause += f"{rng.choice([',', ''])} {rng.choice(LINKS)} {_clause(rng)}"
    if rng.random() < 0.15:
        clause = f"{rng.choice(OPENERS)} {clause}"
    return clause[0].upper() + clause[1:] + rng.choices(".?!:", weights=(20, 2, 1, 1))[0]


def _clause(rng: random.Random) -> str:
    verb = rng.choice(VERBS)
    form = rng.choice(
        [
            _third_person(verb),
            f"can {verb}",
            f"must {verb}",
            f"will not {verb}",
            f"is {_gerund(verb)}",
            f"did {verb}",
        ]
    )
    words = [_noun_phrase(rng), form, _noun_phrase(rng)]
    if rng.random() < 0.5:
        words += [rng.choice(PREPOSITIONS), _noun_phrase(rng)]
    if rng.random() < 0.3:
        words.insert(1, rng.choice(ADVERBS))
    return " ".join(words)


def _noun_phrase(rng: random.Random) -> str:
    noun = rng.choice(NOUNS)
    choice = rng.random()
    if choice < 0.15:
        return rng.choice(["it", "they", "we", "she", "he", "this", "nobody", "everything", "somebody"])
    if choice < 0.3:
        return f"{rng.randrange(2, 1000)} {_plural(noun)}"
    determiner = rng.choice(["the", "a", "each", "this", "our", "their", "no", "every", "another", "its"])
    adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.5 else ""
    if determiner == "a" and (adjective or noun)[0] in "aeiou":
        determiner = "an"
    return f"{determiner} {adjective}{noun}"


def _identifier(rng: random.Random) -> str:
    return "_".join(
        rng.choice((NOUNS, VERBS, ADJECTIVES)[rng.randrange(3)]) for _ in range(rng.randrange(1, 4))
    )


def _code(rng: random.Random) -> str:
    name, argument, other = _identifier(rng), _identifier(rng), _identifier(rng)
    return rng.choice(
        [
            f"def {name}({argument}, {other}=None):\n    return {argument}.{rng.choice(VERBS)}({other})\n",
            f"for {argument} in {name}:\n    if {argument}.{other} > {rng.randrange(100)}:\n        continue\n",
            f"    {name} = {other}[{rng.randrange(16)}] + {argument}  # {_clause(rng)}\n",
            f'    raise ValueError(f"{name} is {{{argument}}}, but must be {rng.choice(ADJECTIVES)}")\n',
            f"{rng.choice(NOUNS)}/{name}.py:{rng.randrange(1, 400)}: {other} = {argument}()\n",
            f"$ {rng.choice(VERBS)} --{name.replace('_', '-')} {rng.randrange(100)}\n",
        ]
    )


def _row(rng: random.Random) -> str:
    cells = [f"{rng.choice(NOUNS):<12}", *(f"{rng.randrange(10_000):>6}" for _ in range(4))]
    return f"{'  '.join(cells)}  20{rng.randrange(10, 40)}-0{rng.randrange(1, 10)}-1{rng.randrange(10)}\n"


def _json(rng: random.Random) -> str:
    def value() -> object:
        return rng.choice([rng.randrange(1000), True, None, _identifier(rng), rng.choice(NOUNS)])

    fields = {_identifier(rng): value() for _ in range(rng.randrange(1, 5))}
    return json.dumps(fields | {"description": _clause(rng)}) + "\n"


def _third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x", "z", "o")):
        return verb + "es"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + "s"


def _gerund(verb: str) -> str:
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    return (verb[:-1] if verb.endswith("e") and not verb.endswith("ee") else verb) + "ing"


def _plural(noun: str) -> str:
    return _third_person(noun)
