"""The README's picture: score, held-out accuracy and KL over the steps of two reference runs.

    python tools/curves.py        writes docs/curves.svg; needs matplotlib

Lines of a recipe with several seeds are their mean, in a band (or bar) from the lowest to the highest.
"""

import json
from pathlib import Path

HERE = Path(__file__).parent.parent
RUNS = HERE / "runs" / "reference"
ACCURACY, SCORE, KL = "val-core/", "critic/score/mean", "actor/reward_kl_penalty"
RECIPES = {
    "quickstart: 2 CPU cores, 10 steps of 24 prompts, 3 seeds":
        sorted((RUNS / "cpu-quickstart").glob("seed*.jsonl")),
    "1 H200: 50 steps of 128 prompts, two digits, 1 seed": [RUNS / "h200-smollm2" / "metrics.jsonl"],
}


def points(file: Path, key: str) -> dict[int, float]:
    """{step: value} of the first metric of each line whose name starts with `key`."""
    found = {}
    for line in map(json.loads, file.read_text().splitlines()):
        values = [value for name, value in line.items() if name.startswith(key)]
        if values:
            found[line["training/global_step"]] = values[0]
    return found


def draw(axes, files: list[Path], key: str, colour: str, marker: str, label: str) -> None:
    seeds = [points(file, key) for file in files]
    steps = sorted(set.intersection(*map(set, seeds)))
    columns = [[seed[step] for seed in seeds] for step in steps]
    means = [sum(column) / len(column) for column in columns]
    axes.plot(steps, means, marker, color=colour, label=label)
    lowest, highest = [*map(min, columns)], [*map(max, columns)]
    if len(steps) > 2:
        axes.fill_between(steps, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    else:
        axes.vlines(steps, lowest, highest, color=colour)


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "curves"  # the same file from the same numbers
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(10, 5), sharey="row", layout="constrained")
    for (title, files), (above, below) in zip(RECIPES.items(), axes.T, strict=True):
        draw(above, files, SCORE, "tab:blue", "-", "score in training, mean of a batch")
        draw(above, files, ACCURACY, "tab:orange", "o--", "greedy accuracy, held out")
        draw(below, files, KL, "tab:green", "-", "KL to the reference, nats a token")
        above.set_title(title, fontsize=10)
        above.set_ylim(0, 0.85)
        below.set(ylim=0, xlabel="step")
    axes[0, 0].legend(loc="upper left")
    axes[1, 0].legend(loc="upper left")
    figure.savefig(HERE / "docs" / "curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
