"""Prints kvtier's figures, each as a ratio to a limit measured in the same run."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

import assemble
import copying
import disk
import first_token
import serving
from figure import Figure

PARTS = {
    "copying": copying.measure,
    "assemble": assemble.measure,
    "serving": serving.measure,
    "disk": disk.measure,
    "engine": first_token.measure,
}


def span(samples: tuple[float, ...], form: str) -> str:
    """Least and greatest, where there is more than one."""
    return f"{min(samples):{form}}..{max(samples):{form}}" if len(samples) > 1 else ""


def show(figures: list[Figure], console: Console) -> None:
    table = Table(title="kvtier, figures of one run")
    for column in ("figure", "value", "min..max", "against", "ratio", "min..max", "want", ""):
        table.add_column(column, justify="left" if column == "figure" else "right")
    for f in figures:
        table.add_row(
            f.name,
            f"{f.value:.4g} {f.unit}",
            span(f.samples, ".3g"),
            f"{f.against:.4g} {f.unit} ({f.against_name})",
            f"{f.ratio:.2f}",
            span(f.ratios, ".2f"),
            f"{f.want:.2f}" if f.want else "",
            ("ok" if f.ok else "[red]below[/red]") if f.want else "",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as JSON")
    parser.add_argument("--part", action="append", choices=sorted(PARTS), help="only this part; may be repeated")
    args = parser.parse_args()
    console = Console(highlight=False)
    figures: list[Figure] = []
    for name in args.part or PARTS:
        with console.status(f"measuring: {name}"):
            figures += PARTS[name]()
    show(figures, console)
    if args.json:
        args.json.write_text(json.dumps({"figures": [f.as_json() for f in figures]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
