"""Processes of grammars: what ends them, what their end costs, and that none is left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import rootstock
from hostile_constraints import all_of_patterns
from rootstock.errors import CompilerBusy, ConstraintFailed, ConstraintRefused, EngineStopped
from rootstock.text.constraints.asked import Constraint, Lark, Regex
from rootstock.text.constraints.compiler import ConstraintCompiler
from rootstock.text.constraints.frames import Link, LinkBroken
from rootstock.text.constraints.host import HOST, GrammarHost, GrammarLost
from rootstock.text.constraints.progress import AnswerProgress
from rootstock.text.constraints.turns import CompileTurns, refuse_gone
from rootstock.text.constraints.vocabulary import Vocabulary
from rootstock.text.prompts.tenant_salt import PromptOwner
from text.constraints.helpers import BYTES, VOCAB, random_answer
from waiting import HANG_S, wait_until

VOCABULARY = Vocabulary(BYTES, VOCAB, BYTES.eos_token_ids)
# Within the bounds that are checked before.
ENDLESS = json.dumps({"type": "string", "allOf": [all_of_patterns(60), all_of_patterns(60)]})
COMPILE = {"do": "compile", "kind": "json"}


@pytest.fixture
def host() -> Iterator[GrammarHost]:
    made = GrammarHost()
    with made.used():
        yield made


def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(BYTES, VOCAB, BYTES.eos_token_ids)


def never() -> bool:
    return False


def children(pid: int) -> list[int]:
    """Returns the processes that a process has started and that have not ended."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True
    )
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [int(row[0]) for row in rows if int(row[1]) == pid and not row[2].startswith("Z")]


# ---- faults of the library cost the requests of one grammar


def test_a_chain_that_overflows_the_stack_is_an_error_of_its_grammar(host: GrammarHost) -> None:
    hosted = host.add(VOCABULARY, never)
    deep = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(8_000)), 'r8000: "a"'])
    with pytest.raises(GrammarLost, match="too deep into each other"):
        host.fork(hosted).compiled({"do": "compile", "kind": "lark"}, deep.encode(), "")
    answer = host.fork(hosted).compiled(COMPILE, b'{"type": "null"}', "")
    assert "error" not in answer.head, "others go on"


def test_a_compile_without_end_is_ended(host: GrammarHost) -> None:
    """By its time on a slow machine, by its memory on a fast one."""
    process = host.fork(host.add(VOCABULARY, never))
    with pytest.raises(GrammarLost, match=r"takes too (long|much memory)"):
        process.compiled(COMPILE, ENDLESS.encode(), "")


def test_the_end_of_a_process_fails_its_answers_alone() -> None:
    made = compiler()
    one, other = (made.compile(Constraint(Regex(text))) for text in ("[ab]{9}", "[cd]{9}"))
    assert one.grammar is not None
    failing, going_on = AnswerProgress(one), AnswerProgress(other)
    for progress in (failing, going_on):
        progress.prepare()
    assert HOST.pid is not None
    before = len(children(HOST.pid))
    one.grammar.process.kill()
    wait_until(lambda: len(children(HOST.pid or 0)) < before)
    failing.accept(ord("a"))
    with pytest.raises(ConstraintFailed):
        failing.settle()
    going_on.accept(ord("c"))
    going_on.settle()
    assert random_answer(other, BYTES, VOCAB, BYTES.eos_token_ids, 1)[1]
    again = made.compile(Constraint(Regex("[ab]{9}")), PromptOwner(salt="another"))
    assert random_answer(again, BYTES, VOCAB, BYTES.eos_token_ids, 1)[1]


def test_the_host_starts_anew_when_it_has_died() -> None:
    made = GrammarHost()
    with made.used():
        hosted = made.add(VOCABULARY, never)
        assert made.fork(hosted).compiled(COMPILE, b'{"type": "null"}', "").body
        started = made.pid
        assert started is not None
        os.kill(started, signal.SIGKILL)
        wait_until(lambda: started not in children(os.getpid()))
        assert made.fork(hosted).compiled(COMPILE, b'{"type": "null"}', "").body
        assert made.pid not in (None, started)


def test_a_process_that_sends_nonsense_is_lost() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for nonsense in (
            b"\xff" * 8,
            b"\x02\x00\x00\x00\x00\x00\x00\x00[]",
            b"\x01\x00\x00\x00\x00\x00\x00\x00{",
        ):
            theirs.sendall(nonsense)
            with pytest.raises(LinkBroken):
                Link(ours).receive()


# ---- none is left behind


def test_processes_end_with_their_grammars_and_with_the_last_vocabulary() -> None:
    made = GrammarHost()
    hosted = made.add(VOCABULARY, never)
    process = made.fork(hosted)
    assert process.compiled(COMPILE, b'{"type": "null"}', "").body
    host_pid = made.pid
    assert host_pid is not None
    assert len(children(host_pid)) == 1
    del process
    wait_until(lambda: not children(host_pid))
    del hosted
    assert made.pid is None
    assert host_pid not in children(os.getpid())


def test_a_grammar_goes_on_without_its_compiler_and_ends_the_last_process() -> None:
    made = GrammarHost()
    process = made.fork(made.add(VOCABULARY, never))
    gc.collect()
    assert process.compiled(COMPILE, b'{"type": "null"}', "").body
    host_pid = made.pid
    del process
    assert made.pid is None
    assert host_pid not in children(os.getpid())


def test_descriptors_are_closed() -> None:
    folder = Path("/dev/fd")
    made = compiler()
    made.compile(Constraint(Regex("a")))
    before = len(list(folder.iterdir()))
    for number in range(80):  # more than are kept
        made.compile(Constraint(Regex(f"b{number}")))
    made.close()
    wait_until(lambda: len(list(folder.iterdir())) <= before)


def test_a_closed_compiler_ends_a_compile_in_its_middle() -> None:
    made, errors = compiler(), list[BaseException]()
    made.compile(Constraint(Regex("a")))
    waiting = threading.Event()

    def compile_endlessly() -> None:
        refuse_gone.set(waiting.set)
        try:
            made.compile(Constraint(Lark("start: %json " + ENDLESS)))
        except (EngineStopped, ConstraintRefused) as error:
            errors.append(error)

    thread = threading.Thread(target=compile_endlessly)
    thread.start()
    assert waiting.wait(HANG_S)
    made.close()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [EngineStopped]
    with pytest.raises(EngineStopped):
        made.compile(Constraint(Regex("b")))


def test_a_client_that_leaves_ends_its_compile(host: GrammarHost) -> None:
    class Left(Exception):
        pass

    def leave() -> None:
        raise Left

    process = host.fork(host.add(VOCABULARY, never))
    token = refuse_gone.set(leave)
    try:
        with pytest.raises(Left):
            process.compiled(COMPILE, ENDLESS.encode(), "")
    finally:
        refuse_gone.reset(token)
    assert host.pid is not None
    wait_until(lambda: not children(host.pid or 0))


SERVER = """
import sys, threading
sys.path[:0] = {paths!r}
from text.constraints.helpers import BYTES, VOCAB
from text.constraints.test_grammar_host import COMPILE, ENDLESS, VOCABULARY, never
from rootstock.text.constraints.host import HOST
process = HOST.fork(HOST.add(VOCABULARY, never))
asked = process.ask(COMPILE, ENDLESS.encode())
print(HOST.pid, flush=True)
threading.Event().wait()
"""


def test_processes_do_not_outlive_a_killed_server() -> None:
    paths = [str(Path(rootstock.__file__).parents[1]), str(Path(__file__).parents[2])]
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER.format(paths=paths)], stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    with server.stdout:
        host_pid = int(server.stdout.readline())
        wait_until(lambda: len(children(host_pid)) == 1)
        [grammar_pid] = children(host_pid)
        server.kill()
        server.wait()
    for pid in (host_pid, grammar_pid):
        wait_until(lambda pid=pid: not is_running(pid))  # type: ignore[misc]


def is_running(pid: int) -> bool:
    listed = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")


# ---- turns


def test_a_compile_that_has_used_less_comes_first_and_the_smaller_of_new_ones() -> None:
    turns, order = CompileTurns(at_once=1), list[str]()
    with turns.of("a", 10) as held:
        with turns.wait(held):
            threads = []
            for name, tenant, chars, used in (
                ("long", "a", 1, 3),
                ("large", "b", 900, 0),
                ("small", "b", 9, 0),
            ):

                def run(name: str = name, tenant: str = tenant, chars: int = chars, used: int = used) -> None:
                    with turns.of(tenant, chars) as turn:
                        turn.used = used
                        with turns.wait(turn):
                            order.append(name)

                threads.append(threading.Thread(target=run))
                threads[-1].start()
            wait_until(lambda: turns.waiting == 3)
        for thread in threads:
            thread.join(HANG_S)
    assert order == ["small", "large", "long"]


def test_a_tenant_has_few_long_compiles_at_once_and_leaves_room_for_others() -> None:
    turns = CompileTurns(at_once=9)

    def becomes_long(tenant: str) -> None:
        turn = stack.enter_context(turns.of(tenant, 1))
        turn.used = 4
        with turns.wait(turn):
            pass

    with ExitStack() as stack:
        for tenant in ("a", "a", "b", "b"):
            becomes_long(tenant)
        with pytest.raises(CompilerBusy):
            becomes_long("c")
    with ExitStack() as stack:
        becomes_long("a")
        becomes_long("a")
        with pytest.raises(CompilerBusy):
            becomes_long("a")
        becomes_long("b")


def test_the_shared_host_serves_this_process() -> None:
    compiler().compile(Constraint(Regex("a")))
    assert HOST.pid in children(os.getpid())
