"""`make bench`: every benchmark of this folder, one after the other, tables on standard output.

`make bench ARGS="parse sidecar"` runs those whose file name contains one of the words.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def main(words: list[str]) -> int:
    """Run the chosen benchmarks; the exit code is that of the last one that failed."""
    scripts = sorted(p for p in HERE.glob("*.py") if p.name != Path(__file__).name)
    chosen = [p for p in scripts if not words or any(w in p.stem for w in words)]
    if not chosen:
        names = ", ".join(p.stem for p in scripts)
        print(f"no benchmark is called like that; there are: {names}", file=sys.stderr)
        return 2
    code = 0
    for number, script in enumerate(chosen, 1):
        print(f"\n## {script.stem} ({number} of {len(chosen)})\n", flush=True)
        begin = time.monotonic()
        done = subprocess.run([sys.executable, str(script)], check=False)
        print(f"\n({script.stem}: {time.monotonic() - begin:.0f} s)", flush=True)
        if done.returncode:
            print(f"{script.stem} failed with {done.returncode}", file=sys.stderr)
            code = done.returncode
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
