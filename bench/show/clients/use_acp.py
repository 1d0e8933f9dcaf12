"""A coding agent over the Agent Client Protocol, as editors run one: JSON-RPC by its standard input and output.

`python use_acp.py [--continue] COMMAND… PROMPT` starts the command, says the prompt in a new session or in the one
that the last run began, allows all calls of tools, and prints the answer's text.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import IO, Any

SESSION = Path.home() / "acp_session"  # the id of the session, for the next run
EXIT_S = 20.0


class Connection:
    """A client's end of the protocol."""

    def __init__(self, to_agent: IO[str], from_agent: IO[str]) -> None:
        self._to_agent, self._from_agent = to_agent, from_agent
        self._ids = count(1)
        self.said: list[str] = []  # pieces of the agent's text

    def call(self, method: str, **params: Any) -> Any:
        """Returns the result of a method, after answering the agent's questions in the meantime."""
        id = next(self._ids)
        self._send({"id": id, "method": method, "params": params})
        for line in self._from_agent:
            message = json.loads(line)
            if "method" in message:
                self._take(message)
            elif message["id"] == id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
        raise RuntimeError(f"{method}: the agent ended")

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params") or {}
        if message["method"] == "session/update":
            update = params["update"]
            if update["sessionUpdate"] == "agent_message_chunk":
                self.said.append(update["content"].get("text", ""))
        elif message["method"] == "session/request_permission":
            [allowed, *_] = [one for one in params["options"] if one["kind"].startswith("allow")]
            outcome = {"outcome": "selected", "optionId": allowed["optionId"]}
            self._send({"id": message["id"], "result": {"outcome": outcome}})
        elif "id" in message:
            self._send({"id": message["id"], "error": {"code": -32601, "message": "not here"}})

    def _send(self, message: dict[str, Any]) -> None:
        self._to_agent.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._to_agent.flush()


def main() -> None:
    goes_on = sys.argv[1] == "--continue"
    *command, prompt = sys.argv[2 if goes_on else 1 :]
    place: dict[str, Any] = {"cwd": str(Path.cwd()), "mcpServers": []}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        connection = Connection(agent.stdin, agent.stdout)
        connection.call("initialize", protocolVersion=1, clientCapabilities={})
        if goes_on:
            session = SESSION.read_text()
            connection.call("session/load", sessionId=session, **place)
            connection.said.clear()  # loading tells the conversation
        else:
            session = connection.call("session/new", **place)["sessionId"]
            SESSION.write_text(session)
        connection.call("session/prompt", sessionId=session, prompt=[{"type": "text", "text": prompt}])
        print("".join(connection.said))
        agent.stdin.close()
        agent.wait(EXIT_S)


if __name__ == "__main__":
    main()
