"""G4: answers that follow JSON schemas, and the cost of their masks.

Suite: every schema of the JSON-Schema-Test-Suite (drafts 7 and 2020-12). A schema that cannot be enforced must be
refused. For every other one, answers of random logits are validated by `jsonschema`, and each instance of the suite,
written as JSON, is put to the matcher: an invalid one must be refused. A valid one may be refused too, because the
matcher wants the properties in the schema's order and takes formats seriously; those are counted.

Tools: the schemas of some 200 tools of Claude Code, Codex, opencode, qwen-code and public MCP servers, read from the
installed packages when they run (real_tools.py), and 200 more (tool_schemas.py: 50 tools written for this, each as
four generators write it). They are not strict, as those of tools are. Answers of random logits are validated by
`jsonschema` with all keywords and formats that it checks.

Cost: decode steps of eight sequences of the 80M model by the engine, with the mask of a tool's schema and without,
in pairs that alternate; the ratio is the median of the pairs' ratios.

Needs `jsonschema`. The suite is the folder `json/tests` of jsonschema's source distribution: --suite names it, or an
unpacked or packed distribution; without the option pip downloads it to a temporary folder. --modules names the folder
`node_modules` with the clients and servers; without the option npm installs them in a temporary folder.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from common import argument_parser, at_least, at_most, conclude, could_not, exactly
from real_tools import install, real_schemas
from tool_schemas import tool_schemas

from rootstock.engine.logits_processors import ResolvedSampling
from rootstock.engine.request import Request, RequestId, StopParams
from rootstock.engine.sampling import Sampler
from rootstock.errors import RequestError
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.text.constraints.asked import Constraint
from rootstock.text.constraints.compiled import CompiledConstraint
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.constraints.json_schema import json_schema_of
from rootstock.text.constraints.progress import AnswerProgress, Masked

SHOW = "G4"
DRAFTS = {"draft7": "http://json-schema.org/draft-07/schema#", "draft2020-12": None}
SOURCE = "jsonschema==4.25.1"
ANSWERS, MOST_TOKENS = 3, 2_000
BYTES = ByteTokenizer()
# Random logits write long strings and deep values. These end them: quotes, brackets, and the end of the answer.
LIKELY = np.array([*b'"]}', BYTES.END])
PAIRS, BATCH, STEPS, WARM_STEPS, CONTEXT_TOKENS = 9, 8, 40, 4, 256
MOST_STEP_COST = 1.05


@dataclass(slots=True)
class Counts:
    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by the reason, roughly
    answers: int = 0
    unfinished: int = 0
    failed: int = 0  # the matcher reached a limit
    invalid: list[str] = field(default_factory=list)  # answers
    valid_accepted: int = 0
    valid_refused: int = 0
    invalid_refused: int = 0
    invalid_accepted: list[str] = field(default_factory=list)

    @property
    def supported(self) -> int:
        return self.schemas - self.refused.total()


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--suite", type=Path, help="json/tests, or a source distribution of jsonschema")
    options.add_argument("--modules", type=Path, help="node_modules with the clients and MCP servers")
    options.add_argument("--answers", type=int, default=ANSWERS, help="of each schema")
    options.add_argument("--pairs", type=int, default=PAIRS)
    options.add_argument("--skip-suite", action="store_true")
    options.add_argument("--skip-tools", action="store_true")
    options.add_argument("--skip-cost", action="store_true")
    given = options.parse_args()
    try:
        import jsonschema  # noqa: F401
    except ImportError:
        could_not(SHOW, "jsonschema is not installed")

    figures: dict[str, Any] = {}
    bars: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if not given.skip_suite:
            counts = of_suite(suite_in(given.suite, Path(folder)), given.answers)
            figures |= reported("suite", counts)
            bars |= {"suite_invalid_answers": exactly(0), "suite_invalid_instances_accepted": exactly(0)}
            bars["suite_supported"] = at_least(1)
        if not given.skip_tools:
            modules = given.modules or install(Path(folder) / "npm")
            if modules is None:
                could_not(SHOW, "npm could not install the clients and MCP servers; give --modules")
            real = real_schemas(modules, Path(folder) / "homes")
            figures["real_tools_of"] = dict(Counter(name.split(": ")[0] for name in real))
            for name, schemas in (("real_tools", real), ("written_tools", tool_schemas())):
                counts = of_tools(schemas, given.answers)
                figures |= reported(name, counts)
                bars |= {
                    f"{name}_schemas": at_least(200),
                    f"{name}_invalid_answers": exactly(0),
                    f"{name}_refused": exactly(0),
                    f"{name}_limits_reached": exactly(0),
                }
        if not given.skip_cost:
            figures |= step_cost(Path(folder), given.pairs)
            bars["step_ratio"] = at_most(MOST_STEP_COST)
    conclude(SHOW, figures, bars)


def reported(name: str, counts: Counts) -> dict[str, Any]:
    for text in counts.invalid:
        print(f"{name}: an answer is invalid: {text}", flush=True)
    for text in counts.invalid_accepted:
        print(f"{name}: an invalid instance is accepted: {text}", flush=True)
    return {
        f"{name}_schemas": counts.schemas,
        f"{name}_supported": counts.supported,
        f"{name}_refused": counts.refused.total(),
        f"{name}_refused_for": dict(counts.refused.most_common(12)),
        f"{name}_answers": counts.answers,
        f"{name}_unfinished_answers": counts.unfinished,
        f"{name}_invalid_answers": len(counts.invalid),
        f"{name}_limits_reached": counts.failed,
        f"{name}_valid_instances_accepted": counts.valid_accepted,
        f"{name}_valid_instances_refused": counts.valid_refused,
        f"{name}_invalid_instances_refused": counts.invalid_refused,
        f"{name}_invalid_instances_accepted": len(counts.invalid_accepted),
    }


# ---- schemas


def of_suite(tests: Path, answers: int) -> Counts:
    counts = Counts()
    for draft, case in cases(tests):
        schema = case["schema"]
        if isinstance(schema, dict) and DRAFTS[draft] is not None:
            schema = {"$schema": DRAFTS[draft]} | schema
        name = f"{draft}: {case['description']}"
        constraint = checked(schema, name, counts, answers, strict=True)
        if constraint is None:
            continue
        assert constraint.grammar is not None
        for test in case["tests"]:
            accepted = accepts(constraint, test["data"])
            if test["valid"]:
                counts.valid_accepted += accepted
                counts.valid_refused += not accepted
            elif accepted:
                counts.invalid_accepted.append(f"{name}: {test['description']}")
            else:
                counts.invalid_refused += 1
    return counts


def of_tools(schemas: dict[str, Any], answers: int) -> Counts:
    counts = Counts()
    for name, schema in schemas.items():
        checked(schema, name, counts, answers, strict=False)
    return counts


def checked(
    schema: Any, name: str, counts: Counts, answers: int, *, strict: bool
) -> CompiledConstraint | None:
    """Compiles a schema and validates answers of random logits. None: the schema is refused."""
    from jsonschema.validators import validator_for

    counts.schemas += 1
    compiler = ConstraintCompiler(BYTES, BYTES.vocab_size, BYTES.eos_token_ids)
    try:
        constraint = compiler.compile(Constraint(json_schema_of(schema, "schema", strict=strict)))
    except RequestError as error:
        counts.refused[" ".join(error.message.split()[4:9])] += 1
        return None
    kind = validator_for(
        schema, default=validator_for({"$schema": "https://json-schema.org/draft/2020-12/schema"})
    )
    validator = kind(schema, format_checker=None if strict else kind.FORMAT_CHECKER)
    for seed in range(answers):
        try:
            text = random_answer(constraint, seed)
        except Exception as error:
            counts.failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        counts.answers += 1
        if text is None:
            counts.unfinished += 1
            continue
        try:
            errors = [each.message[:120] for each in validator.iter_errors(json.loads(text))]
            if errors:  # -91.8 is no multiple of 0.0001 in floating point: decimal numbers decide
                exact = validator.evolve(schema=json.loads(json.dumps(schema), parse_float=Decimal))
                errors = [
                    each.message[:120] for each in exact.iter_errors(json.loads(text, parse_float=Decimal))
                ]
        except Exception as error:
            errors = [f"{type(error).__name__}: {error}"]
        if errors:
            counts.invalid.append(f"{name}: {text[:200]!r}: {errors[0]}")
    return constraint


def random_answer(constraint: CompiledConstraint, seed: int) -> str | None:
    """Returns an answer of random logits that ended, or None if it did not end in time."""
    logits = np.random.default_rng(seed)
    progress = AnswerProgress(constraint)
    prompt = BYTES.encode("Answer: ")
    sampler = Sampler(
        ResolvedSampling(), prompt, BYTES.vocab_size, seed, BYTES.eos_token_ids, progress=progress
    )
    tokens: list[int] = []
    for at in range(MOST_TOKENS):
        row = logits.normal(size=BYTES.vocab_size).astype(np.float32)
        row[LIKELY] += 1.5 + at / 40  # the longer, the more
        token = sampler.sample(row).token
        if token == BYTES.END:
            return BYTES.decode(tokens)
        tokens.append(token)
        if progress.is_complete:
            return BYTES.decode(tokens)
    return None


def accepts(constraint: CompiledConstraint, instance: Any) -> bool:
    """Returns whether the matcher takes an instance in one of the usual ways to write it."""
    for separators in ((",", ":"), (", ", ": ")):
        text = json.dumps(instance, separators=separators, ensure_ascii=False).encode()
        progress = AnswerProgress(constraint)
        if progress.agreeing(list(text)) < len(text):
            continue
        for token in text:
            progress.accept(token)
        restriction = progress.restriction()
        if isinstance(restriction, Masked) and restriction.may_end:
            return True
    return False


def cases(tests: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for draft in DRAFTS:
        for path in sorted((tests / draft).glob("*.json")):
            for case in json.loads(path.read_text()):
                yield draft, case


def suite_in(given: Path | None, folder: Path) -> Path:
    """Returns the folder of the suite's drafts, from an archive or the registry if need be."""
    if given is None:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            folder,
        ]
        if subprocess.run([*map(str, command), SOURCE], check=False).returncode:
            could_not(SHOW, f"pip could not download {SOURCE}; give --suite")
        given = next(folder.glob("jsonschema-*.tar.gz"))
    if given.is_file():
        with tarfile.open(given) as archive:
            archive.extractall(folder, filter="data")
        given = folder
    for place in (given, *given.glob("**/json/tests")):
        if (place / "draft2020-12").is_dir():
            return place
    return could_not(SHOW, f"{given} holds no suite")


# ---- the cost of a step


def step_cost(folder: Path, pairs: int) -> dict[str, Any]:
    from llamas import random_prompts, say, write_streaming_llama
    from our_side import Ours

    from rootstock.config import EngineConfig
    from rootstock.text.tokenizer import HFTokenizer

    path = write_streaming_llama(folder / "80m")
    tokenizer = HFTokenizer.load(str(path))
    ours = Ours(path, "bfloat16", 1.0, EngineConfig(draft_tokens=0))
    vocab_size = ours.runtime.description.vocab_size
    compiler = ConstraintCompiler(tokenizer, vocab_size, tokenizer.eos_token_ids)
    row = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        "required": ["path"],
    }
    never_ends = {"type": "array", "items": row | {"additionalProperties": False}, "minItems": 1_000}
    constraint = compiler.compile(Constraint(json_schema_of(never_ends, "schema")))

    def steps_s(constraint: CompiledConstraint | None, number: int) -> float:
        """Returns the median seconds of a decode step of the whole batch."""
        prompts = random_prompts(BATCH, CONTEXT_TOKENS, seed=number)
        got: list[list[object]] = [[] for _ in prompts]
        sampling = ResolvedSampling(temperature=1.0, seed=number)
        stop = StopParams(max_tokens=WARM_STEPS + STEPS, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            id = RequestId(f"{number}-{constraint is None}-{i}")
            ours.engine.submit(Request(id, prompt, sampling, stop, constraint=constraint), got[i].append)
        while min(map(len, got)) < WARM_STEPS:
            assert ours.engine.step()
        times = []
        for _ in range(STEPS - WARM_STEPS):
            began = time.perf_counter()
            ours.engine.step()
            times.append(time.perf_counter() - began)
        while ours.engine.step():
            pass
        return statistics.median(times)

    steps_s(None, 0)
    steps_s(constraint, 1)
    ratios, plain_s = [], []
    for pair in range(pairs):
        order = (None, constraint) if pair % 2 == 0 else (constraint, None)
        took = {each is None: steps_s(each, 2 + pair) for each in order}
        ratios.append(took[False] / took[True])
        plain_s.append(took[True])
        say(f"pair {pair}: {took[True] * 1e3:.2f} ms without masks, ratio {ratios[-1]:.3f}")
    return {
        "step_ms_without_masks": round(statistics.median(plain_s) * 1e3, 2),
        "step_ratio": round(statistics.median(ratios), 3),
        "step_ratios": [round(ratio, 3) for ratio in ratios],
        "vocabulary": vocab_size,
    }


if __name__ == "__main__":
    main()
