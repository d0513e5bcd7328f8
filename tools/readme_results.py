"""Put the table of the last `make demo` into README.md, so that no figure there was typed by hand."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results: made by `make readme-results` -->\n", "<!-- end of results -->"


def main() -> None:
    results = json.loads((ROOT / "demo-out" / "results.json").read_text())
    lines = [
        f"`make demo`, the embedded model (3.7 million weights), {results['rows'][0]['tokens']:,} held-out tokens:\n",
        "| format | run by | file | bits per weight | KL to float | perplexity ratio | same top token | as torch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        low, high = row["kl_ci95"]
        kl = f"{row['kl_mean']:.4f} ± {(high - low) / 2:.4f}" if row["kl_mean"] > 1e-3 else f"{row['kl_mean']:.1e}"
        figures = (f"{row['bytes'] / 1e6:.2f} MB", f"{row['bits_per_weight']:.2f}", kl, f"{row['ppl_ratio']:.4f}")
        agreement = f"{100 * row['top1_agreement']:.1f} %"
        lines.append(
            f"| {' | '.join((row['format'], row['runtime'], *figures, agreement, 'yes' if row['crosscheck']['agrees'] else 'NO'))} |"
        )
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
