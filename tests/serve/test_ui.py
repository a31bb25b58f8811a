"""The page: the picture of the cache against the cache itself, its addresses, and the page in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import httpx2
import pytest
from engines import make, prompt, run, serve, small_model
from serving import serving

from perilune.serve import Params
from perilune.serve.cache import DEVICE, HOST
from perilune.serve.server import ServerConfig
from perilune.serve.ui import Watch
from perilune.serve.ui.view import MAX_NODES, MAX_STARTS

ONE = Params(max_tokens=1, temperature=0)


def watched(**options):
    engine = make(small_model(), exact=False, **options)
    return engine, Watch(engine.scheduler, engine.clock)


# --- the picture


def test_the_picture_is_the_tree():
    engine, watch = watched(host_pages=60, pages=10)
    shared = prompt(128, 1)
    for seed in range(6):
        serve(engine, [shared + prompt(100, 10 + seed)], ONE)
    picture = watch.picture()
    json.dumps(picture)
    nodes = {node.number: node for node in engine.cache.tree.nodes()}
    shown = {each["id"]: each for each in picture["nodes"]}
    assert set(shown) == set(nodes)
    for number, each in shown.items():
        node = nodes[number]
        assert (each["start"], each["end"], each["pins"], each["used"]) == (node.start, node.end, node.pins, node.used)
        assert each["tier"] == {DEVICE: "device", HOST: "host"}[node.tier]
        assert each["checkpoint"] == (node.kind if node.state is not None else None)
        above = node.parent.number if node.parent is not engine.cache.tree.root else None
        assert each["parent"] == above
    assert {each["tier"] for each in shown.values()} == {"device", "host"}
    order = [each["id"] for each in picture["nodes"]]
    assert all(
        each["parent"] is None or order.index(each["parent"]) < order.index(each["id"]) for each in shown.values()
    )


def test_bytes_by_class_add_up_while_requests_run():
    engine, watch = watched(host_pages=40)
    serve(engine, [prompt(300, 1)], ONE)
    engine.add(prompt(300, 1)[:256] + prompt(64, 2), Params(max_tokens=5))
    engine.add(prompt(200, 3), Params(max_tokens=5))
    seen_running = 0
    while engine.busy:
        engine.step()
        for tier, arena in zip(watch.picture()["tiers"], engine.cache.arenas, strict=True):
            page = engine.cache.geometry.page_bytes
            assert tier["capacity"] == arena.capacity * page
            assert tier["kv"] + tier["checkpoints"] + tier["running"] + tier["free"] == tier["capacity"]
            assert min(tier[name] for name in ("kv", "checkpoints", "running", "free")) >= 0
            seen_running = max(seen_running, tier["running"])
    assert seen_running > 0
    assert watch.picture()["tiers"][0]["running"] == 0


def test_hits_are_seen_as_they_happen():
    engine, watch = watched()
    first, other = prompt(200, 1), prompt(150, 2)
    serve(engine, [first], ONE)
    serve(engine, [[*first, 1, 2, 3]], ONE)
    serve(engine, [other], ONE)
    starts = watch.picture()["starts"]
    assert [start["seq"] for start in starts] == [1, 2, 3]
    assert [(start["cached"], start["prompt"]) for start in starts] == [(0, 200), (192, 203), (0, 150)]
    assert starts[0]["node"] is None
    (node,) = [each for each in watch.picture()["nodes"] if each["id"] == starts[1]["node"]]
    assert node["end"] == 192
    assert watch.picture()["sums"] == {"requests": 3, "prompt": 553, "cached": 192}
    engine.add([*other, 5], Params(max_tokens=3))
    engine.step()
    (request,) = watch.picture()["requests"]
    assert (request["prompt"], request["cached"], request["state"]) == (151, 128, "decode")
    run(engine)
    assert watch.picture()["requests"] == []


def test_a_request_that_was_parked_is_counted_once():
    engine, watch = watched(pages=14, reserve=0.0)
    for seed in range(3):
        engine.add(prompt(130, seed), Params(max_tokens=150, temperature=0))
    run(engine)
    assert engine.counters.preempted > 0
    picture = watch.picture()
    assert len(picture["starts"]) == 3 + engine.counters.preempted
    assert picture["sums"] == {"requests": 3, "prompt": 390, "cached": engine.counters.cached}


def test_a_tenant_sees_its_own():
    engine, watch = watched()
    same = prompt(200, 1)
    serve(engine, [same], ONE, salt="a")
    serve(engine, [same], ONE, salt="b")
    serve(engine, [[*same, 1]], ONE, salt="b")
    for salt, requests in (("a", 1), ("b", 2), ("c", 0)):
        picture = watch.picture(lambda each, salt=salt: each == salt)
        assert picture["sums"]["requests"] == requests
        assert len(picture["starts"]) == requests
        assert bool(picture["nodes"]) == (requests > 0)
    ids = [{n["id"] for n in watch.picture(lambda each, salt=s: each == salt)["nodes"]} for s in ("a", "b")]
    assert not ids[0] & ids[1]
    assert ids[0] | ids[1] == {node["id"] for node in watch.picture()["nodes"]}
    # Prefixes whose owner is not known any more belong to nobody who has a key.
    watch._owners.clear()
    assert watch.picture(lambda each: each == "a")["nodes"] == []
    assert watch.picture()["nodes"]


def test_a_picture_is_bounded():
    """More paths than are shown: the newest are, each with all that is above it."""
    engine, watch = watched(pages=4000, slots=8, token_budget=2048)
    shared = prompt(64, 0)
    for seed in range(0, MAX_NODES + 40, 8):
        serve(engine, [shared + prompt(65, 1000 + seed + i) for i in range(8)], ONE)
    picture = watch.picture()
    assert len(picture["nodes"]) <= MAX_NODES
    assert picture["more_nodes"] == len([*engine.cache.tree.nodes()]) - len(picture["nodes"]) > 0
    ids = {each["id"] for each in picture["nodes"]}
    assert all(each["parent"] is None or each["parent"] in ids for each in picture["nodes"])
    hidden = [node for node in engine.cache.tree.nodes() if node.number not in ids]
    leaves = [each for each in picture["nodes"] if each["id"] not in {e["parent"] for e in picture["nodes"]}]
    assert min(each["used"] for each in leaves) >= max(node.used for node in hidden)
    assert len(picture["starts"]) == MAX_STARTS


def test_the_picture_needs_no_torch():
    code = "import sys; sys.modules['torch'] = sys.modules['fastapi'] = None; import perilune.serve.ui"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- the addresses


@pytest.fixture(scope="module")
def url():
    with serving() as address:
        yield address


PAGE = files("perilune.serve.ui")


def text_of(name):
    return PAGE.joinpath(name).read_text()


def test_the_page_brings_everything_itself(url):
    with httpx2.Client(base_url=url, follow_redirects=True) as client:
        answer = client.get("/ui")
        assert answer.url.path == "/ui/"
        assert answer.headers["content-type"].startswith("text/html")
        html = answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        scripts = {path.name for path in PAGE.iterdir() if path.name.endswith(".js")}
        imported = {name for script in scripts for name in re.findall(r' from "\./(\w+\.js)"', text_of(script))}
        assert scripts == imported | {"app.js"}
        assert all(f'"{name}"' in html for name in ("app.css", "app.js", "icon.svg"))
        kinds = {"app.css": "text/css", "icon.svg": "image/svg+xml"} | dict.fromkeys(scripts, "text/javascript")
        for name, kind in kinds.items():
            part = client.get(f"/ui/{name}")
            assert part.headers["content-type"].startswith(kind)
            assert part.content == PAGE.joinpath(name).read_bytes()
            assert part.headers["x-content-type-options"] == "nosniff"
    # The policy would forbid them: nothing inline, nothing from elsewhere.
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\son\w+=", html)
    css, js = text_of("app.css"), "".join(text_of(script) for script in scripts)
    assert not re.search(r"https?://", html + css + js)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function", js)


def test_state_and_events(url):
    with httpx2.Client(base_url=url, timeout=30) as client:
        state = client.get("/ui/state").json()
        assert {"now", "tiers", "nodes", "requests", "starts", "sums"} <= state.keys()
        with client.stream("GET", "/ui/events") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            lines = stream.iter_lines()
            assert next(lines) == "event: picture"
            before = json.loads(next(lines).removeprefix("data: "))
            body = {"model": "tiny", "prompt": "a new prompt " * 20, "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
            pictures = (json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))
            # One of the request while it waits may come first.
            assert any(after["sums"]["requests"] == before["sums"]["requests"] + 1 for after in pictures)


def test_the_page_is_free_and_the_picture_needs_the_key():
    config = ServerConfig(model_names=("tiny",), api_keys=("right",), drain_seconds=2)
    with serving(config) as url, httpx2.Client(base_url=url, timeout=60) as client:
        assert client.get("/ui/").status_code == client.get("/ui/app.js").status_code == 200
        for path in ("/ui/state", "/ui/events"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"Authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/ui/state", headers={"Authorization": "Bearer right"}).status_code == 200


def test_a_stream_of_pictures_does_not_keep_a_server_from_stopping():
    """Which would wait for it until it ends by itself, after 30 s."""
    config = ServerConfig(model_names=("tiny",), drain_seconds=60)
    with serving(config) as url, httpx2.Client(base_url=url, timeout=60) as client:
        stream = client.stream("GET", "/ui/events")
        answer = stream.__enter__()
        next(answer.iter_lines())
        begin = time.monotonic()
    assert time.monotonic() - begin < 25


# --- colours


def contrast(a, b):
    """The ratio of two #rrggbb colours (WCAG 2.2, relative luminance)."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_can_be_read_and_marks_can_be_told_apart(theme):
    """WCAG AA: 4.5 for text; 3 for what is drawn, against the panel."""
    css = PAGE.joinpath("app.css").read_text()
    block = css.split('[data-theme="light"]')[theme == "light"].split("}")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
    for ground in ("ground", "panel", "raised"):
        for text in ("text", "soft", "accent", "bad"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    assert contrast(colours["text"], colours["mine"]) >= 4.5
    for mark in ("device", "host", "dot", "run"):
        assert contrast(colours[mark], colours["panel"]) >= 3, mark


# --- a real browser

ROOT = Path(__file__).parents[2]
PLAYWRIGHT = ROOT / "build" / "browser"


@pytest.fixture(scope="session")
def drive():
    """drive(url, scenario, key): a scenario of ui_browser.mjs. Skips, saying why, where there is no browser."""
    node, chromium = shutil.which("node"), shutil.which("chromium")
    if node is None or chromium is None:
        pytest.skip(f"needs node and Debian's chromium; {'chromium' if node else 'node'} is not on the PATH")
    if not (PLAYWRIGHT / "node_modules" / "playwright-core").exists():
        pytest.skip("needs `npm install --prefix build/browser playwright-core@1.65.1`")

    def run(url, scenario, key=""):
        script = Path(__file__).with_name("ui_browser.mjs")
        command = [node, str(script), str(PLAYWRIGHT), chromium, url, scenario, key]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr

    return run


@pytest.mark.browser
@pytest.mark.parametrize("scenario", ["conversation", "stop", "refused", "tools", "themes", "labels"])
def test_in_a_browser(drive, url, scenario):
    drive(url, scenario)


@pytest.mark.browser
def test_the_browser_asks_for_the_key(drive):
    config = ServerConfig(model_names=("tiny",), api_keys=("right",), drain_seconds=2)
    with serving(config) as url:
        drive(url, "key", "right")


@pytest.mark.browser
def test_two_hundred_conversations_in_a_browser(drive):
    with serving() as url, httpx2.Client(base_url=url, timeout=60) as client:
        for i in range(0, 208, 16):
            prompts = [f"conversation {i + j} " + "with its own words " * 8 for j in range(16)]
            body = {"model": "tiny", "prompt": prompts, "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
        drive(url, "many")
