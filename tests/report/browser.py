"""A page opened in a real browser: what its scripts did there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

LIMIT_S = 120
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_PROBE = Path(__file__).with_name("probe.js")


def open_page(page: str, folder: Path, *, size: str = "1200,900", dark: bool = False) -> Any:
    """What `probe.js` told of a page opened from a file; skips where there is no Chromium."""
    browser = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"needs a browser: none of {', '.join(_NAMES)} is installed")
    file = folder / "page.html"
    probed = page.replace("<script type=", f"<script>{_PROBE.read_text()}</script><script type=", 1)
    file.write_text(probed, encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",  # which Chromium refuses to have as root
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'browser'}",
        f"--window-size={size}",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=10000",
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    told = re.search(r"<pre id=\"probe\">(.*?)</pre>", done.stdout, re.DOTALL)
    assert told is not None, done.stderr[-2000:]
    return json.loads(unescape(told[1]))
