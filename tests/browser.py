"""A real headless Chromium, driven over the W3C WebDriver protocol."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

_FLAGS = (
    "--headless",
    "--window-size=1280,900",
    "--no-sandbox",  # CI runs as root
    "--disable-gpu",
    "--disable-dev-shm-usage",  # containers have a small /dev/shm
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # Nothing may be fetched: every host but this machine cannot be resolved.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--force-color-profile=srgb",
)


class Browser:
    """One open page. Methods raise httpx.HTTPStatusError with the driver's own words."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def open(self, page: Path) -> None:
        """Load a file and wait until it is complete."""
        self._post("url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns; its arguments are `arguments[0]`, ..."""
        return self._post("execute/sync", {"script": script, "args": list(arguments)})

    def values(self, selector: str, value: str) -> list[Any]:
        """The value of each element, of an expression of `e`."""
        script = f"return [...document.querySelectorAll(arguments[0])].map((e) => {value})"
        return list(self.run(script, selector))

    def click(self, selector: str) -> None:
        """Scroll to an element and click on it; an element that another one covers is an error."""
        self._post(f"element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        """Type into an element."""
        self._post(f"element/{self._find(selector)}/value", {"text": text})

    def choose(self, selector: str, text: str) -> None:
        """Choose an option of a <select> by its text."""
        found = self.run(
            "const select = document.querySelector(arguments[0]);"
            "const option = [...select.options].find((each) => each.text === arguments[1]);"
            "if (!option || option.disabled) return [...select.options].map((each) => each.text);"
            "select.value = option.value; select.dispatchEvent(new Event('change')); return null;",
            selector,
            text,
        )
        assert found is None, f"{selector} does not offer {text!r}, only {found}"

    def text(self, selector: str) -> str:
        """The visible text of an element."""
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def count(self, selector: str) -> int:
        """Number of elements."""
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def errors(self) -> list[str]:
        """What the page wrote to the console as an error since the last call."""
        entries = self._post("se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def _find(self, selector: str) -> str:
        element = self._post("element", {"using": "css selector", "value": selector})
        return str(next(iter(element.values())))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _value(self._client.post(f"/session/{self._session}/{path}", json=body))


def why_absent() -> str:
    """Why there is no browser to test with; empty when there is one."""
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return (
        f"not installed: {', '.join(missing)} (apt-get install chromium chromium-driver)"
        if missing
        else ""
    )


@contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile in the folder `profile`; ended on every way out."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        port = next(
            line.split()[-1].rstrip(".") for line in driver.stdout if "started successfully" in line
        )
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False
        ) as client:
            options = {"args": [*_FLAGS, f"--user-data-dir={profile}"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            began = _value(client.post("/session", json={"capabilities": {"alwaysMatch": wanted}}))
            try:
                yield Browser(client, began["sessionId"])
            finally:
                client.delete(f"/session/{began['sessionId']}")
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def _value(response: httpx.Response) -> Any:
    value = response.json()["value"]
    if response.is_error:
        raise httpx.HTTPStatusError(
            f"{value['error']}: {value['message'][:500]}",
            request=response.request,
            response=response,
        )
    return value
