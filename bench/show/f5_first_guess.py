"""F5: twenty behaviours, and whether the file that holds each carries the behaviour's word in its path.

The table was written when issue 13 began. The names that implement a behaviour are
looked up in the tree: a file that only has the right name does not count.
"""

from __future__ import annotations

import ast
from pathlib import Path

from common import ROOT, at_least, conclude

PACKAGE = ROOT / "src/rootstock"
BAR = 18


# Behaviour | words, any of which must be in the path | names that implement it, any of them | file before issue 13
BEHAVIOURS = """
refusal when the queue is full | queue scheduler | RequestTable | engine/engine.py
default of the KV budget | budget config | auto_budget_bytes | engine/assemble.py
sliding window of a layer | window mask | MaskPattern | runtime/torch_masks.py
RoPE regime in the namespace | rope keys namespace | of_model | engine/engine.py
acceptance of drafts | accept speculation | accepted_rows | engine/draft_cost.py, engine/engine.py
rootstock cache verify | cache | verify | cli_cache.py, tiers/disk.py
logits of the last rows only | survey runner logits | TorchRuntime | runtime/torch_model.py, runtime/torch_survey.py
order of eviction | eviction | EvictionQueue | cache/eviction.py
admission of a request to the cache | admission | admit Admission | cache/cache.py
writing of checkpoints | checkpoint | CheckpointWriter | cache/cache.py
a block's allocation | block pool | BlockPool | cache/blocks.py
pacing of prefill chunks | pacing chunk | Pacing | engine/pacing.py
stop strings | detoken stop | Detokenizer | engine/text.py
reading of the tier below | tier reader | TierReader | tiers/loader.py
writing of evicted blocks to a tier | write_back writer | WriteBackQueue | cache/spill.py
n-gram drafts | ngram speculation | NgramProposer | engine/drafting.py
self-check of a load | self_check | self_check | runtime/torch_check.py
weights in 8 and 4 bits | quant | Int8 Int4 | kernels/torch_rounded.py
API keys and tenants | access key tenant | Keys | server/access/guard.py
refused OpenAI fields | unsupported schema | refuse_unsupported_fields | server/known_fields.py
"""


def main() -> None:
    defined = definitions()
    right = 0
    table = [[cell.strip() for cell in row.split("|")] for row in BEHAVIOURS.strip().splitlines()]
    for behaviour, words, names, before in table:
        places = sorted({place for name in names.split() for place in defined.get(name, ())})
        guessed = any(word in place for word in words.split() for place in places)
        right += guessed
        verdict = "right" if guessed else "WRONG"
        print(f"{verdict}  {behaviour}: {', '.join(places) or 'nowhere'} (before: {before})")
    conclude("F5", {"behaviours": len(table), "right": right}, {"right": at_least(BAR)})


def definitions() -> dict[str, set[str]]:
    """Returns the files that define each class, function and method."""
    found: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        place = str(Path(path).relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, set()).add(place)
    return found


if __name__ == "__main__":
    main()
