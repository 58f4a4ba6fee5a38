"""Pages in Firefox: WebDriver BiDi over its own socket, without a driver in between."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from tests.reports.browser import NOTHING_LIT, READY, SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tornado.websocket import WebSocketClientConnection

NAMES = ("firefox-esr", "firefox")
PATH = next(filter(None, map(shutil.which, NAMES)), None)
NO_FIREFOX = f"no Firefox on the path: none of {', '.join(NAMES)}. make browser installs one"
# Where CI is set, nothing is left out: there the tests fail instead.
needs_firefox = pytest.mark.skipif(PATH is None and not os.environ.get("CI"), reason=NO_FIREFOX)
START_SECONDS = 60
LISTENS = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
# Firefox asks for nothing by itself, and what a page asks for goes to a proxy that is not there.
SETTINGS: dict[str, object] = {
    "app.normandy.enabled": False,
    "app.update.disabledForTesting": True,
    "browser.safebrowsing.malware.enabled": False,
    "browser.safebrowsing.phishing.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "extensions.update.enabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    "network.proxy.type": 1,
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "services.settings.server": "data:,#remote-settings-dummy/v1",
}
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}


class Socket:
    """Commands and events of WebDriver BiDi, in an event loop beside that of Playwright."""

    def __init__(self, address: str) -> None:
        from tornado.websocket import websocket_connect

        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.events: list[dict[str, Any]] = []
        self.number = 0

        async def connect() -> WebSocketClientConnection:
            return await websocket_connect(address)

        self.connection = self._run(connect())

    def _run(self, task: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(task, self.loop).result(START_SECONDS)

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send a command and return its result; events on the way are kept."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params}
        return self._run(self._answer(json.dumps(command)))  # type: ignore[no-any-return]

    async def _answer(self, command: str) -> dict[str, Any]:
        await self.connection.write_message(command)
        while True:
            message = await self.connection.read_message()
            assert message is not None, "Firefox closed its socket"
            reply: dict[str, Any] = json.loads(message)
            if reply["type"] == "event":
                self.events.append(reply)
            elif reply.get("id") == self.number:
                assert reply["type"] == "success", reply
                result: dict[str, Any] = reply["result"]
                return result

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.connection.close)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@dataclass
class FirefoxPage:
    """A page in Firefox, with what it fetched and complained about."""

    socket: Socket
    context: str

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression; it comes as JSON."""
        expression = f"JSON.stringify(({script}) ?? null)"
        reply = self.socket.call(
            "script.evaluate",
            expression=expression,
            target={"context": self.context},
            awaitPromise=True,
        )
        assert reply["type"] == "success", reply
        return json.loads(reply["result"]["value"])

    def poll(self, condition: str) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}; {self.complaints}"
            time.sleep(0.02)

    def wait(self, until: str) -> None:
        """Wait until a condition holds of the state ``s``."""
        self.poll(f"(() => {{ const s = headwise.state(); return {until}; }})()")

    def state(self) -> dict[str, Any]:
        """What the viewer shows."""
        shown: dict[str, Any] = self.evaluate("headwise.state()")
        return shown

    # ---- a hand ---------------------------------------------------------------------------------

    def centre(self, selector: str) -> tuple[int, int]:
        """Scroll to an element, and return the middle of it in the window."""
        x, y = self.evaluate(
            f"""(() => {{
              const found = document.querySelector({json.dumps(selector)});
              found.scrollIntoView({{ block: "nearest" }});
              const box = found.getBoundingClientRect();
              return [box.left + box.width / 2, box.top + box.height / 2];
            }})()"""
        )
        return round(x), round(y)

    def _act(self, kind: str, actions: Sequence[dict[str, Any]]) -> None:
        source = {"type": kind, "id": kind, "actions": list(actions)}
        self.socket.call("input.performActions", context=self.context, actions=[source])

    def click(self, selector: str) -> None:
        """Move the pointer to an element and press."""
        x, y = self.centre(selector)
        move = {"type": "pointerMove", "x": x, "y": y}
        self._act(
            "pointer", [move, *({"type": f"pointer{x}", "button": 0} for x in ("Down", "Up"))]
        )

    def press(self, *keys: str) -> None:
        """Press keys one after the other."""
        values = [KEYS.get(key, key) for key in keys]
        self._act("key", [{"type": t, "value": v} for v in values for t in ("keyDown", "keyUp")])

    def turn_wheel(self, selector: str, by: int) -> None:
        """Turn the wheel over an element."""
        x, y = self.centre(selector)
        self._act("wheel", [{"type": "scroll", "x": x, "y": y, "deltaX": 0, "deltaY": by}])

    # ---- what it said ---------------------------------------------------------------------------

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.socket.events if event["method"] == method]

    @property
    def complaints(self) -> list[str]:
        """Return the errors of scripts and the lines of the console."""
        return [str(entry["text"]) for entry in self._events("log.entryAdded")]

    @property
    def requests(self) -> list[str]:
        """Return the addresses that the page asked for; those of data are in the page."""
        asked = self._events("network.beforeRequestSent")
        addresses = [each["request"]["url"] for each in asked if each["context"] == self.context]
        return [address for address in addresses if not address.startswith("data:")]


class Firefox:
    """Firefox without a window: a tab for each page."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket

    @contextmanager
    def open(self, path: Path, *, width: int = 1400, height: int = 900) -> Iterator[FirefoxPage]:
        """Open a file until the viewer is ready."""
        call = self.socket.call
        tab = call("browsingContext.create", type="tab")["context"]
        call(
            "browsingContext.setViewport", context=tab, viewport={"width": width, "height": height}
        )
        self.socket.events.clear()
        call(
            "browsingContext.navigate",
            context=tab,
            url=path.as_uri() + NOTHING_LIT,
            wait="complete",
        )
        page = FirefoxPage(self.socket, tab)
        page.poll(READY)
        try:
            yield page
        finally:
            call("browsingContext.close", context=tab)


@contextmanager
def firefox() -> Iterator[Firefox]:
    """Start the browser with a profile of its own."""
    assert PATH is not None, NO_FIREFOX
    with TemporaryDirectory() as profile:
        lines = [f"user_pref({json.dumps(k)}, {json.dumps(v)});" for k, v in SETTINGS.items()]
        Path(profile, "user.js").write_text("\n".join(lines), "utf-8")
        command = [PATH, "--headless", "--remote-debugging-port=0", "--profile", profile]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                socket = Socket(f"{_address(process)}/session")
                socket.call("session.new", capabilities={})
                events = ["log.entryAdded", "network.beforeRequestSent"]
                socket.call("session.subscribe", events=events)
                yield Firefox(socket)
                socket.call("session.end")
                socket.close()
            finally:
                process.terminate()


def _address(process: subprocess.Popen[str]) -> str:
    """Return the address of the socket, which Firefox says among its errors."""
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if found := LISTENS.search(line):
            threading.Thread(target=process.stderr.read, daemon=True).start()
            return found[1]
    raise AssertionError(f"Firefox gave no address: {''.join(said)}")
