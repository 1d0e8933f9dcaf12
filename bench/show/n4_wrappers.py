"""N4: models of text and images, every class of transformers, as small models with random weights: the text that they
serve, or the reason of the refusal.

    served    logits in chunks, decodes and batches equal transformers' own on text alone
    refused   by design: encoders, attention to later positions, models that need an image in every prompt, classes
              that classify or write no text token by token, packages that are not installed, and kinds of layers
              that are not known

A refusal for any other reason, a failure, or other logits miss the bar.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from common import argument_parser, at_least, conclude, exactly

from rootstock.errors import ModelError
from twins.architectures import VOCAB
from twins.driving import allocate, packed_logits, random_tokens
from twins.torch_models import load
from twins.wrappers import WRAPPERS, tiny_wrapper

SHOW = "N4"
TOLERANCE = 1e-3  # standard deviations of the logits
_FIRST = 20  # token, behind the special ones
# Parts of refusals that are meant.
BY_DESIGN = (
    "has an encoder",
    "takes no cache",
    "does not run on text alone",
    "attends to later positions",
    "counts positions in a way of its own",
    "declares no decoder of text",
    "needs another package",
    "has no decoder of text",
    "which this version does not know",
    "classifies and writes no text",
    "does not write text token by token",
)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--only", default=",".join(WRAPPERS), help="types, comma-separated")
    given = options.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = given.only.split(",")
    said = {}
    for name in names:
        said[name] = outcome(name)
        print(f"{name:<24} {said[name]}", flush=True)
    served = [name for name, words in said.items() if words.startswith("served")]
    refused = [name for name, words in said.items() if any(part in words for part in BY_DESIGN)]
    others = {name: words for name, words in said.items() if name not in served and name not in refused}
    figures: dict[str, Any] = {
        "classes": len(said),
        "served": len(served),
        "refused_by_design": len(refused),
        "served_or_refused_by_design": len(served) + len(refused),
        "others": others,
        "wrong": sum("wrong" in words for words in others.values()),
    }
    bars = {"served_or_refused_by_design": at_least(min(90, len(said))), "wrong": exactly(0)}
    conclude(SHOW, figures, bars)


def outcome(name: str) -> str:
    """Returns in words what became of a model."""
    try:
        model = tiny_wrapper(name)
    except ImportError as error:  # of transformers' own code, which refuses the model in the product, too
        return f"refused: needs another package ({' '.join(str(error).split())[:60]})"
    except Exception as error:
        return f"not made: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            runtime = load(Path(folder), "float32")
        except ModelError as refusal:
            return f"refused: {refusal.message[refusal.message.find(folder) + len(folder) + 1 :].strip(': ')[:200]}"
        except Exception as error:
            return f"failed: {type(error).__name__}: {error}"
        allocate(runtime)
        own = type(model).from_pretrained(folder, attn_implementation="eager").eval()
        sequences = [random_tokens(VOCAB - _FIRST, length, length) + _FIRST for length in (40, 21)]
        with torch.inference_mode():
            expected = np.concatenate([logits_of(own, tokens) for tokens in sequences])
        got = np.concatenate(packed_logits(runtime, sequences, [{0: 17, 1: 20}, {1: 1, 0: 22}, {0: 1}]))
        error = float(np.abs(got - expected).max() / expected.std())
        return f"{'served' if error <= TOLERANCE else 'wrong'}: {runtime.description.execution_mode}, {error:.1e}"


def logits_of(model: Any, tokens: Any) -> Any:
    ids = torch.from_numpy(np.array(tokens)).long()[None]
    return model(input_ids=ids, use_cache=False).logits[0].float().numpy()


if __name__ == "__main__":
    main()
