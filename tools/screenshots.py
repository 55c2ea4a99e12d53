"""docs/report-laptop.png and docs/report-phone.png: the report of known runs in a browser.

    python tools/screenshots.py                     needs chromium, or BROWSER=... with its options
    python tools/screenshots.py --all FOLDER        both widths, light and dark, to look at
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools import report  # noqa: E402

BROWSER = os.environ.get("BROWSER", "chromium")
RUNS = ROOT / "runs" / "reference"
# name: (runs, width, height, dark)
PICTURES = {
    "report-laptop": (sorted((RUNS / "cpu-quickstart").glob("*.jsonl")), 1280, 1326, False),
    "report-phone": ([RUNS / "h200-smollm2" / "metrics.jsonl"], 390, 1254, True),
}


def take(picture: Path, page: Path, width: int, height: int, dark: bool) -> None:
    """The top of a page, as a window of this size shows it."""
    subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
         f"--window-size={width},{height}", f"--screenshot={picture}",
         f"--blink-settings=preferredColorScheme={int(not dark)}", page.as_uri()],
        check=True, capture_output=True, timeout=120,
    )


def main(arguments: list[str]) -> None:
    folder = Path(arguments[1]).resolve() if arguments[:1] == ["--all"] else ROOT / "docs"
    with tempfile.TemporaryDirectory() as scratch:
        for name, (runs, width, height, dark) in PICTURES.items():
            page = Path(scratch) / f"{name}.html"
            report.main([*map(str, runs), "--out", str(page)])
            if folder == ROOT / "docs":
                take(folder / f"{name}.png", page, width, height, dark)
                continue
            for wide, high in ((1280, 1400), (390, 1400)):
                for is_dark in (False, True):
                    kind = "dark" if is_dark else "light"
                    take(folder / f"{name}-{wide}-{kind}.png", page, wide, high, is_dark)


if __name__ == "__main__":
    main(sys.argv[1:])
