"""Write docs/img/NAME.png: the top of a page in a window of 1160 pixels. Needs Chromium.

python scripts/make_screenshots.py report=runs/RUN/report.html smoke=FOLDER/smoke.html
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.browser import Browser  # noqa: E402 - the tests are no package of the project


def main() -> None:
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for name, _, page in (word.partition("=") for word in sys.argv[1:]):
            browser.open(Path(page).resolve().as_uri(), 1160)
            browser.draw()
            browser.screenshot(ROOT / "docs" / "img" / f"{name}.png", height=1000)
        browser.close()


if __name__ == "__main__":
    main()
