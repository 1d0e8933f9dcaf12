"""Report of a run: a table for people, and JSON with the requests that show each finding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from rootstock.conformance.server import Json, Server, path_of
from rootstock.conformance.suite import CaseResult, SuiteResult
from rootstock.conformance.talk import Exchange


def line_of(result: CaseResult) -> str:
    """Returns the line of a case."""
    name = f"{result.case.name:<16}"
    if not result.sent:
        return f"{name} skipped: {result.refused}"
    found = ""
    if result.shared_tokens:
        found = f", {result.cached_tokens / result.shared_tokens:.1%} of what was sent before found"
    kinds = Counter(finding.kind for finding in result.findings)
    verdict = ", ".join(f"{count} × {kind}" for kind, count in kinds.items()) or "ok"
    part = f"; then skipped: {result.refused}" if result.refused else ""
    return f"{name} {verdict}: {result.answers} answers, {result.compared} compared{found}{part}"


def summary(result: SuiteResult) -> Iterator[str]:
    """Yields the lines behind the cases: what was measured how, and each finding."""
    can = result.server.can
    how = {
        "cache_salt": "with a cache_salt of its own",
        "cache_prompt": "with cache_prompt: false",
        "flood": "after other requests, until it was forgotten",
        "": "the first time (nothing found the same prompt cold again)",
    }[can.cold_by]
    yield f"Each answer was compared with the same prompt, computed {how}."
    if not can.has_logprobs:
        yield "The server gives no log-probabilities: a rounding between two equal tokens looks like a wrong answer."
    unknown = sum(each.ids is None for case in result.cases for each in case.sent if each.answer)
    if not can.tokenizes:
        yield "The server gives no token ids: counts were checked only against the prompt's length."
    elif unknown:
        yield f"No or wrong token ids of {unknown} prompts: counts were checked only against the length."
    if not can.says_cached:
        yield "The server does not say how many tokens it found."
    yield f"Rounding: {result.noise:.2g} nats. A difference counts from {result.tolerance:.2g} nats on."
    for finding in result.findings:
        yield f"{finding.case}, request {finding.request}: {finding.kind}. {finding.what}"
    yield f"{len(result.findings)} findings" if result.findings else "No finding."


def as_json(result: SuiteResult) -> Json:
    """Returns the whole result. Cases with findings have their requests, in order."""
    return {
        "server": asdict(result.server.can),
        "noise_nats": result.noise,
        "tolerance_nats": result.tolerance,
        "findings": len(result.findings),
        "cases": [_case(each, result.server) for each in result.cases],
    }


def _case(result: CaseResult, server: Server) -> Json:
    told: Json = {
        "case": result.case.name,
        "about": result.case.about,
        "answers": result.answers,
        "compared": result.compared,
        "largest_nats": result.largest_nats,
        "shared_tokens": result.shared_tokens,
        "cached_tokens": result.cached_tokens,
        "skipped": result.refused,
        "findings": [
            {"kind": each.kind, "what": each.what, "request": each.request, "nats": each.nats}
            for each in result.findings
        ],
    }
    if result.findings:
        last = max(each.request for each in result.findings)
        told["sent"] = [_sent(each, server) for each in result.sent[: last + 1]]
    return told


def _sent(sent: Exchange, server: Server) -> Json:
    """Returns a request as it was sent, with what came back."""
    if not sent.body:
        return {"how": sent.how}
    told: Json = {
        "how": sent.how,
        "path": path_of(sent.body),
        "body": server.complete_body(sent.body, stream=sent.streamed),
        "sent_before": sent.shared,
    }
    if sent.answer is not None:
        told |= {name: getattr(sent.answer, name) for name in ("text", "prompt_tokens", "cached_tokens")}
    return told
