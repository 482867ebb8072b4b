"""Print what a project and some of its extras require, one requirement a line.

With that list an image installs the dependencies before the source is copied, in a layer that a
change of the source does not invalidate.

    python3 requirements.py pyproject.toml EXTRA...
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """Requirements of the project and of these extras, in the file's order.

    Raises:
        KeyError: the project has no extra of that name.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    found = list(project.get("dependencies", ()))
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in requirements(Path(sys.argv[1]), sys.argv[2:]))
