"""H1: the dashboard in headless Chromium under live load, with a tree of 100,000 nodes.

The server is real: its engine runs the oracle runtime, whose forwards are slowed down so that requests last. The tree
is made through the cache's own admissions before the engine starts. Agents of three tenants then ask over HTTP.

Playwright opens the page with the operator's key, and judges that every panel updates, that the tree is drawn at
20 frames a second while it is zoomed and moved, that a miss is explained, that stopping, pinning and clearing work,
and that the chat answers. axe-core must find no serious violation in any of four modes: desktop and phone, dark and
light. A page with a tenant's key must show that tenant's prefixes alone. The page's own work is measured as a share
of the time. The chat page in docs/ is opened from disk and from another origin, and must answer as well.

`--d4` measures another thing instead: how much longer D4's workload takes with an open page (page_cost.py).

It needs the package playwright, a Chromium, and axe-core's axe.min.js:

    python bench/show/h1_dashboard.py --chromium /usr/bin/chromium --axe node_modules/axe-core/axe.min.js
    python bench/show/h1_dashboard.py --chromium /usr/bin/chromium --d4
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import itertools
import os
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import page_cost
from common import ROOT, argument_parser, at_least, at_most, conclude, could_not, exactly

from rootstock.cache import KVCache
from rootstock.cache.lease import Admitted, ReleaseReason
from rootstock.config import EngineConfig, ServerConfig
from rootstock.engine.build import Assembly
from rootstock.engine.engine import Engine
from rootstock.server.app import create_app
from rootstock.server.http.listen import running
from rootstock.server.routes.dashboard.feed import Feed
from rootstock.server.routes.dashboard.views import Names, Texts, View
from rootstock.testing.byte_tokenizer import ByteTokenizer
from rootstock.testing.fake_runtime import FULL, STATE, FakeRuntime
from rootstock.text.prompts.tenant_salt import salt_of

SHOW = "H1"
NODES = 100_000
BLOCK = 8
TENANTS = ("research", "support", "build-agents")
CHAT_PAGE = ROOT / "docs" / "chat.html"
KEYS = {f"key-of-{name}": name for name in TENANTS}
ADMIN = "operators-key"
FORWARD_S = 0.02
HOURS_OF_AGE = 3.0
WAIT_MS = 20_000
SYSTEM = "You are a coding agent. You have a shell and an editor. " * 24
FINDINGS = """async () => (await axe.run()).violations.map(
  (found) => [found.id, found.impact, found.nodes.map((node) => `${node.target} ${node.any[0]?.message}`)]
)"""
# Frames while the tree is zoomed in, moved, and zoomed out: a wheel event before each.
FRAMES = """async () => {
  const canvas = document.getElementById("tree"), box = canvas.getBoundingClientRect();
  canvas.scrollIntoView({block: "center"});
  const y = canvas.getBoundingClientRect().top + 200, x = box.left + box.width * 0.4;
  const wheel = (more) => new WheelEvent("wheel", {clientX: x, clientY: y, cancelable: true, ...more});
  const frame = () => new Promise(requestAnimationFrame);
  await frame();
  const times = [];
  let drawn = 0;
  for (let i = 0; i < 180; i++) {
    const began = performance.now(), zooms = i < 60 || i >= 120;
    canvas.dispatchEvent(wheel({deltaY: i < 60 ? -60 : zooms ? 60 : 30, shiftKey: !zooms}));
    await frame();
    await frame();
    times.push((performance.now() - began) / 2);
    drawn = Math.max(drawn, Number(canvas.dataset.drawn));
  }
  return {times, drawn};
}"""


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument("--chromium", default=os.environ.get("ROOTSTOCK_CHROMIUM", shutil.which("chromium")))
    options.add_argument("--axe", default=os.environ.get("ROOTSTOCK_AXE"), help="axe-core's axe.min.js")
    options.add_argument("--nodes", type=int, default=NODES)
    options.add_argument("--pictures", type=Path, default=ROOT / "docs" / "img")
    options.add_argument("--d4", action="store_true", help="measure D4's workload with an open page instead")
    options.add_argument("--d4-model", default=page_cost.MODEL)
    options.add_argument("--d4-turns", type=int, default=page_cost.TURNS, help="of each of the eight agents")
    options.add_argument("--d4-rounds", type=int, default=page_cost.ROUNDS)
    options.add_argument("--d4-without-browser", action="store_true", help="measure the plain client alone")
    given = options.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        could_not(SHOW, "the package playwright is not installed")
    if given.chromium is None or (given.axe is None and not given.d4):
        could_not(SHOW, "--chromium and --axe name a browser and axe.min.js")
    if given.d4:
        figures = page_cost.measure(
            given.chromium,
            given.d4_model,
            given.d4_turns,
            given.d4_rounds,
            draws=not given.d4_without_browser,
        )
        conclude(SHOW, figures, {"wall_ratio_client": at_most(1.01)})
    with page_elsewhere() as (elsewhere, origin):
        show(given, sync_playwright, elsewhere, origin)


def show(given: Any, sync_playwright: Any, elsewhere: str, origin: str) -> None:
    server = ServerConfig(
        admin_key=ADMIN,
        tenant_keys=KEYS,
        show_prompts=True,
        aliases=(),
        allowed_hosts=("127.0.0.1",),
        allowed_origins=(origin, "null"),
    )
    made, nodes = slow_engine(given.nodes)
    print(f"a tree of {nodes:,} nodes", flush=True)
    figures = {"nodes": nodes}
    with (
        made.engine,
        running(create_app(made, server), made.engine) as url,
        agents(url),
    ):
        with sync_playwright() as play:
            browser = play.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
            figures |= Watcher(browser, url, Path(given.axe).read_text(), given.pictures, elsewhere).watch()
            browser.close()
        figures["work_share"] = round(work_share(made), 5)
    conclude(
        SHOW,
        figures,
        {
            "panels": exactly(sorted(PANELS)),
            "nodes": at_least(given.nodes),
            "frames_per_s": at_least(20),
            "axe_serious": exactly(0),
            "console_errors": exactly(0),
            "explained": exactly(True),
            "stopped": exactly(True),
            "pinned": exactly(True),
            "cleared": exactly(True),
            "chat_answered": exactly(True),
            "chat_pages_answered": exactly(2),
            "tenant_sees_own_only": exactly(True),
            "pictures_below_200_kb": exactly(True),
            "work_share": at_most(0.01),
        },
    )


# ------------------------------------------------------------------------------------------------ the server


def slow_engine(nodes: int) -> tuple[Assembly, int]:
    """Returns an engine with a tree of so many nodes, whose forwards take FORWARD_S."""
    offset = -HOURS_OF_AGE * 3600
    runtime = FakeRuntime(
        ByteTokenizer.vocab_size,
        16_384,
        families=(FULL, STATE),
        eos_token_ids=ByteTokenizer().eos_token_ids,
        fault=lambda _batch: time.sleep(FORWARD_S),
    )
    # Half of it stays free: a node that is being looked at must not be evicted by the agents' requests.
    budget = 2 * ((nodes * 2 * BLOCK + 200_000) * 16 + 4_000 * 16)

    def clock() -> float:
        return time.monotonic() + offset

    cache = KVCache(runtime.description.families, budget, BLOCK, clock=clock)
    runtime.allocate(cache.rows, BLOCK)
    engine = Engine(runtime, cache, EngineConfig(max_batch=8, chunk_tokens=256), ByteTokenizer())
    rng = np.random.default_rng(0)
    salts = [salt_of(name, None) for name in TENANTS]
    heads = [rng.integers(0, 256, int(rng.integers(100, 500))) for _ in range(24)]
    sessions = [
        (
            salts[int(rng.integers(0, 3))],
            np.concatenate([heads[int(rng.integers(0, 24))], rng.integers(0, 256, 40)]),
        )
        for _ in range(nodes // 40)
    ]
    made = 0
    while cache.usage().used_bytes < budget * 0.45 and made < nodes * 1.02:
        salt, head = sessions[int(len(sessions) * rng.random() ** 2)]
        tokens = np.concatenate([head, rng.integers(0, 256, int(rng.integers(4, 12)))]).astype(np.int32)
        admitted = cache.admit(cache.match(tokens, engine.namespace(salt)))
        assert isinstance(admitted, Admitted)
        cache.commit(admitted.lease, tokens[admitted.lease.num_computed_tokens :])
        cache.release(admitted.lease, ReleaseReason.FINISHED)
        made += 1
        offset = -HOURS_OF_AGE * 3600 * (1 - made / (nodes * 1.02))
    offset = 0.0
    found = cache.stats().nodes
    made_of = Assembly(
        engine,
        ByteTokenizer(),
        runtime.description,
        pool_tokens=cache.capacity_tokens,
        pool_bytes=budget,
        tier=None,
        block_size=BLOCK,
    )
    return made_of, found


@contextlib.contextmanager
def page_elsewhere() -> Iterator[tuple[str, str]]:
    """Serves docs/ at another origin. Yields the URL of the chat page, and the origin."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(CHAT_PAGE.parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as host:
        thread = threading.Thread(target=host.serve_forever, daemon=True)
        thread.start()
        origin = f"http://127.0.0.1:{host.server_address[1]}"
        try:
            yield f"{origin}/{CHAT_PAGE.name}", origin
        finally:
            host.shutdown()
            thread.join()


@contextlib.contextmanager
def agents(url: str) -> Iterator[None]:
    """Asks for chats of every tenant until the block ends: with a shared head, and with a date in the head."""
    ended = threading.Event()

    def ask(name: str, index: int) -> None:
        with httpx.Client(base_url=url, timeout=60, headers={"x-api-key": f"key-of-{name}"}) as client:
            for turn in itertools.count():
                date = f"Now it is {turn % 60:02}:{index:02}. " if index == 1 else ""
                text = f"Fix the bug number {turn % 7} in module {index}. " + "The log says so. " * (turn % 5)
                messages = [{"role": "system", "content": date + SYSTEM}, {"role": "user", "content": text}]
                body = {
                    "messages": messages,
                    "max_tokens": 40 + 30 * index,
                    "prompt_cache_key": f"agent {index}",
                }
                with contextlib.suppress(httpx.HTTPError):
                    client.post("/v1/chat/completions", json=body)
                if ended.wait(0.2 * index):
                    return

    threads = [
        threading.Thread(target=ask, args=(name, index), daemon=True)
        for name in TENANTS
        for index in range(3)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()


def work_share(made: Assembly) -> float:
    """Returns the time that a feed takes for one page, as a share of ten seconds."""
    feed = Feed(made.engine, Names(ServerConfig()), Texts(made.tokenizer, show_prompts=True))
    view = View(None, reads_prompts=True)

    async def watch() -> float:
        began = time.perf_counter()
        async for _ in feed.events(view, lambda: time.perf_counter() - began < 10):
            pass
        return feed.cost.seconds / (time.perf_counter() - began)

    return asyncio.run(watch())


# ------------------------------------------------------------------------------------------------ the page


def until(page: Any, expression: str) -> None:
    """Waits until JavaScript is true. Playwright's own waiting would be refused by the page's security policy."""
    give_up = time.monotonic() + 120
    while not page.evaluate(expression):
        if time.monotonic() > give_up:
            raise TimeoutError(expression)
        page.wait_for_timeout(100)


PANELS = {
    "memory": "#memory .value",
    "rates": "#rates .value",
    "requests": "#requests tbody",
    "misses": "#misses .miss code",
    "tree": "#tree-count",
    "sessions": "#sessions",
}


@dataclass
class Watcher:
    """A person with a browser, who looks at each panel and uses each button."""

    browser: Any
    url: str
    axe: str
    pictures: Path
    elsewhere: str  # URL of the chat page at another origin

    def watch(self) -> dict[str, Any]:
        errors: list[str] = []
        self.found: set[str] = set()
        page = self.page(1440, 1000, "light", errors)
        self.log_in(page, ADMIN)
        figures: dict[str, Any] = {"panels": self.updating(page)}
        page.wait_for_selector("#misses mark", timeout=WAIT_MS)
        figures["explained"] = "tokens" in page.inner_text("#misses .miss")
        frames = page.evaluate(FRAMES)
        figures["frames_per_s"] = round(1000 / statistics.mean(frames["times"]), 1)
        figures["slowest_frame_ms"] = round(max(frames["times"]), 1)
        figures["most_boxes_drawn"] = frames["drawn"]
        page.click("#fit")
        self.use_keys(page)
        figures["chat_answered"] = self.chat(page)
        figures["stopped"] = self.stop(page)
        figures["chat_pages_answered"] = self.chat_pages(errors)
        serious, sizes = self.modes(page, errors)
        figures["axe_serious"] = serious + self.serious_of_chat_pages
        figures["axe_found"] = sorted(self.found)
        figures["pictures_below_200_kb"] = all(size < 200_000 for size in sizes)
        figures["tenant_sees_own_only"] = self.tenant(page, errors)
        figures["pinned"] = self.pin(page)
        figures["cleared"] = self.clear(page)
        figures["console_errors"] = len(errors)
        for error in errors:
            print("console:", error, flush=True)
        return figures

    def page(self, width: int, height: int, scheme: str, errors: list[str], address: str = "") -> Any:
        context = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
        )
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        self.listen(page, errors)
        page.goto(address or self.url)
        return page

    @staticmethod
    def listen(page: Any, errors: list[str]) -> None:
        """Collects the errors of a page's console."""

        def told(message: Any) -> None:
            if message.type == "error":
                errors.append(f"{message.text} {message.location.get('url', '')}")

        page.on("console", told)
        page.on("pageerror", lambda error: errors.append(str(error)))

    def log_in(self, page: Any, key: str) -> None:
        page.fill("#key", key)
        page.click("#login-form button")
        page.wait_for_selector("#panels:not([hidden])")
        page.wait_for_selector("#tree[data-nodes]", timeout=120_000)

    def updating(self, page: Any) -> list[str]:
        """Returns the panels whose text changes within some seconds."""
        before = {
            name: page.inner_text(f"{where} >> nth=0")
            for name, where in PANELS.items()
            if page.query_selector(where)
        }
        changed: set[str] = set()
        for _ in range(90):
            page.wait_for_timeout(500)
            for name, where in PANELS.items():
                found = page.query_selector(where)
                if found is not None and found.inner_text() != before.get(name):
                    changed.add(name)
            if len(changed) == len(PANELS):
                break
        return sorted(changed)

    def use_keys(self, page: Any) -> None:
        page.focus("#tree")
        for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
            page.keyboard.press(key)
        page.wait_for_selector("#node dl")
        assert "Branch" in page.inner_text("#tree-live")
        page.keyboard.press("Home")

    def chat(self, page: Any) -> bool:
        page.fill("#chat-max", "24")
        for _ in range(2):
            page.fill("#chat-text", "How are you today? " * 10)
            page.click("#chat-send")
            page.wait_for_selector("#chat-send:not([disabled])", timeout=60_000)
        told = page.inner_text("#chat-log .message.assistant:last-child .figures")
        print("chat:", told, flush=True)
        return (
            "first token after" in told and "prompt tokens cached" in told and not told.startswith("waiting")
        )

    def stop(self, page: Any) -> bool:
        """Stops a request. One that ends before the button is pressed cannot be stopped: then another one."""
        for _ in range(8):
            page.evaluate(
                "document.querySelector('#requests tr:not(.ended) .stop button:not([hidden])')?.click()"
            )
            if not page.is_visible("#confirm-yes"):
                continue
            page.click("#confirm-yes")
            for _ in range(30):
                page.wait_for_timeout(100)
                if "stopped" in page.inner_text("#requests"):
                    return True
        return False

    def modes(self, page: Any, errors: list[str]) -> tuple[int, list[int]]:
        serious, sizes = 0, []
        storage = page.context.storage_state()
        for kind, (width, height) in {"desktop": (1440, 1000), "phone": (390, 844)}.items():
            for scheme in ("light", "dark"):
                context = self.browser.new_context(
                    viewport={"width": width, "height": height},
                    color_scheme=scheme,
                    storage_state=storage,
                    reduced_motion="reduce",
                    is_mobile=kind == "phone",
                    has_touch=kind == "phone",
                )
                each = context.new_page()
                each.set_default_timeout(WAIT_MS)
                self.listen(each, errors)
                each.goto(self.url)
                each.evaluate("document.getElementById('tree').scrollIntoView()")
                each.wait_for_selector("#tree[data-nodes]", timeout=30_000)
                each.focus("#tree")
                for key in ("ArrowDown", "ArrowDown", "ArrowLeft", "Home"):
                    each.keyboard.press(key)
                each.wait_for_selector("#node dl")
                each.wait_for_selector("#misses mark")
                each.wait_for_timeout(4000)
                each.evaluate("document.activeElement.blur()")
                serious += self.serious(each, f"{kind} {scheme}")
                sizes.append(self.picture(each, f"dashboard-{kind}-{scheme}.png", whole=True))
                context.close()
        return serious, sizes

    def serious(self, page: Any, where: str) -> int:
        """Counts the serious violations that axe finds in a page."""
        page.evaluate(self.axe)
        count = 0
        for name, impact, targets in page.evaluate(FINDINGS):
            self.found.add(f"{name} ({impact})")
            print(f"axe, {where}: {name}, {impact}: {targets[:3]}", flush=True)
            count += impact in ("serious", "critical")
        return count

    def chat_pages(self, errors: list[str]) -> int:
        """Counts the answers that the chat page of the docs gets, from disk and from another origin."""
        answered = self.serious_of_chat_pages = 0
        for number, address in enumerate((CHAT_PAGE.as_uri(), self.elsewhere)):
            scheme = ("light", "dark")[number]
            page = self.page(*((1100, 900), (390, 844))[number], scheme, errors, address)
            page.fill("#url", self.url)
            page.fill("#key", f"key-of-{TENANTS[number]}")
            page.fill("#max", "24")
            page.click("#connect")
            page.wait_for_selector("#send:not([disabled])")
            for _ in range(2):
                page.fill("#text", "How are you on this page? " * 8)
                page.keyboard.press("Enter")
                page.wait_for_selector("#send:not([disabled])", timeout=60_000)
            told = page.inner_text("#log .message.assistant:last-child")
            print(f"chat page, {address.partition(':')[0]}: {told[-90:]!r}", flush=True)
            answered += "first token after" in told and "prompt tokens cached" in told
            self.serious_of_chat_pages += self.serious(page, f"chat page {scheme}")
            self.picture(page, f"chat-page-{scheme}.png", whole=False)
            page.context.close()
        return answered

    def picture(self, page: Any, name: str, whole: bool) -> int:
        """Saves a screenshot with 255 colours, and returns its size."""
        from PIL import Image

        self.pictures.mkdir(parents=True, exist_ok=True)
        taken = Image.open(io.BytesIO(page.screenshot(full_page=whole))).convert("RGB")
        path = self.pictures / name
        taken.quantize(255, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(path, optimize=True)
        return path.stat().st_size

    def tenant(self, page: Any, errors: list[str]) -> bool:
        """Returns whether a page with a tenant's key shows fewer nodes, one tenant, and no memory of all."""
        other = self.page(1200, 900, "light", errors)
        self.log_in(other, f"key-of-{TENANTS[0]}")
        other.wait_for_timeout(3000)
        nodes = int(other.get_attribute("#tree", "data-nodes"))
        all_nodes = int(page.get_attribute("#tree", "data-nodes"))
        other.select_option("#colour", "tenant")
        names = other.inner_text("#tree-legend")
        memory = other.inner_text("#memory")
        print(f"tenant: {nodes:,} of {all_nodes:,} nodes, {names!r}, {memory!r}", flush=True)
        others = any(name in other.inner_text("#panels") for name in TENANTS[1:])
        other.context.close()
        return 0 < nodes < all_nodes and names.strip() == TENANTS[0] and "operator" in memory and not others

    def pin(self, page: Any) -> bool:
        """Pins a prefix on behalf of its tenant, and releases it."""
        self.select_checkpoint(page)
        page.click("#node button:has-text('Pin')")
        page.click("#confirm-yes")
        until(page, "document.getElementById('toast').textContent.includes('inned')")
        told = page.inner_text("#toast")
        if told != "The prefix is pinned.":
            print("pin:", told, flush=True)
            return False
        page.wait_for_selector("#pins li button")
        print("pinned:", page.inner_text("#pins li"), flush=True)
        page.click("#pins li button")
        page.click("#confirm-yes")
        page.wait_for_selector("#pins .empty")
        return True

    def select_checkpoint(self, page: Any) -> None:
        """Goes down the tree to a node with a checkpoint: a hybrid's prefix without one cannot be pinned."""
        page.focus("#tree")
        page.keyboard.press("Home")
        for _ in range(8):
            page.evaluate("document.getElementById('node').replaceChildren()")
            page.focus("#tree")
            page.keyboard.press("ArrowDown")
            page.wait_for_selector("#node dl")
            if "Checkpoints" in page.inner_text("#node"):
                return

    def clear(self, page: Any) -> bool:
        before = int(page.get_attribute("#tree", "data-nodes"))
        page.click("#clear")
        page.click("#confirm-yes")
        until(page, "document.getElementById('toast').textContent.includes('free again')")
        until(page, f"Number(document.getElementById('tree').dataset.nodes) < {before // 10}")
        return True


if __name__ == "__main__":
    main()
