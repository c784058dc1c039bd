"""`python results/documents.py`: write the tables of README.md and docs/ again, from what is kept in results/.

A table stands between `<!-- NAME -->` and `<!-- end -->`; below is what each name shows.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from orchestrator.comparison import by_seed, paired_t
from orchestrator.findings import Report, collect
from orchestrator.runs import runs_of
from orchestrator.summary import Configuration, extremes, history

RESULTS = Path(__file__).parent
DOCUMENTS = [RESULTS.parent / "README.md", *sorted((RESULTS.parent / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- (\w+(?: \w+)*) -->\n)(?:(?!<!--).)*(<!-- end -->)", re.DOTALL)
SURE = 0.05  #: the p-value below which a claim holds or does not


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]]) + "\n"


def percent(values: Sequence[float]) -> str:
    """Return mean and standard deviation of shares in percent."""
    if not values:
        return "-"
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}"


# Published tables -----------------------------------------------------------------------------------------------------


@cache
def published(name: str) -> Mapping[str, Any]:
    """Return the record of a table."""
    found: Mapping[str, Any] = json.loads((RESULTS / name / "table.json").read_text(encoding="utf-8"))
    return found


def beside(name: str) -> str:
    """Show the published number and ours, bold if near, in the columns that have been run, and why others are not."""
    cells = {(c["row"], c["column"]): c for c in published(name)["cells"]}
    ran = {column for (_, column), cell in cells.items() if cell["values"]}
    columns = [column for column in dict.fromkeys(column for _, column in cells) if column in ran]
    common = {column.split(", ")[0] for column in columns}
    short = {column: column.split(", ", 1)[1] if len(common) == 1 else column for column in columns}
    rows, why = [], dict[str, dict[str, list[str]]]()
    for row in dict.fromkeys(row for row, _ in cells):
        own = {short[column]: cells[row, column] for column in columns}
        near = sum(cell["mark"] == "reproduced" for cell in own.values())
        rows.append([row, *map(_cell, own.values()), f"{near} of {sum(bool(cell['values']) for cell in own.values())}"])
        for column, cell in own.items():
            if cell["values"] and cell["mark"] != "reproduced":
                why.setdefault(cell["reason"], {}).setdefault(row, []).append(column)
    told = []
    for reason, found in sorted(why.items(), reverse=True):
        where = ", ".join(f"{row} ({'; '.join(columns)})" for row, columns in found.items())
        told.append(f"- {f'Differs because {reason}' if reason else 'Differs, not explained'}: {where}.\n")
    return "\n".join([grid(["", *short.values(), "reproduced"], rows), "".join(told)])


def _cell(cell: Mapping[str, Any]) -> str:
    if not cell["values"]:
        return f"{cell['published']:.2f}; not run yet"
    ours = f"{cell['ours']:.1f}" + (f" ± {cell['spread']:.1f}" if cell["spread"] is not None else "")
    return f"{cell['published']:.2f}; " + (f"**{ours}**" if cell["mark"] == "reproduced" else ours)


def duels(name: str, key: str = "duels") -> str:
    """Say by how much the paper's best method is better than each other one, in pairs of one split and seed."""
    lines = []
    for duel in published(name)[key]:
        ahead, p = duel["ahead"], duel["p"]
        won = f"ahead in {sum(d > 0 for d in ahead)} of {len(ahead)} pairs"
        lines.append(
            f"- {duel['best']} over {duel['other']}: {mean(ahead):+.1f} points on average, {won}, p = {p:.2g}.\n"
        )
    return "".join(lines)


def fingerprint(name: str) -> str:
    """Name the runs of a table or of another sweep, as the report of a table does."""
    runs = {t["id"]: t["fingerprint"] for own in sweep(name).configurations for t in own.trials if t["fingerprint"]}
    told = "".join(f"{id} {runs[id]}\n" for id in sorted(runs))
    return f"Fingerprint of the runs: `{hashlib.sha256(told.encode()).hexdigest()[:12]}`.\n"


# Sweeps ---------------------------------------------------------------------------------------------------------------


@cache
def sweep(name: str) -> Report:
    """Read a sweep."""
    return collect([RESULTS / name])


def configuration(name: str, trial: str) -> Configuration:
    """Return the configuration that a trial is of; one of another sweep is named with it."""
    *other, trial = trial.split("/")
    name = other[0] if other else name
    return next(c for c in sweep(name).configurations if trial in [t["id"] for t in c.trials])


def means(name: str, rows: Mapping[str, str], metrics: Mapping[str, str], seeds: int = 3) -> str:
    """Show mean and deviation over seeds of what these trials are of; metrics by the head of their column."""
    lines = []
    for label, trial in rows.items():
        own = configuration(name, trial)
        count = max(len(own.values(metric)) for metric in metrics)
        label += "" if count == seeds else f" ({count} seeds)" if count > 1 else " (1 seed)"
        lines.append([label, *(percent(own.values(metric)) for metric in metrics)])
    return grid(["", *metrics.values()], lines)


Claim = tuple[str, str, str, str]  # in words, the trial that is said to be better, than which, by which metric


def claims(name: str, asked: Sequence[Claim]) -> str:
    """Test claims in pairs of one split and seed."""
    rows = []
    for text, better, than, metric in asked:
        apart = by_seed(configuration(name, better), configuration(name, than), metric)
        p, won = paired_t(apart).p, f"{sum(d > 0 for d in apart)} of {len(apart)}"
        verdicts = (
            ("ahead, not surely", "behind, not surely")
            if p is None or p >= SURE
            else ("**holds**", "**does not hold**")
        )
        said = verdicts[mean(apart) <= 0]
        rows.append(
            [text, f"`{metric}`", f"{100 * mean(apart):+.1f}", won, "too few" if p is None else f"{p:.2g}", said]
        )
    return grid(["claim", "metric", "points", "ahead in", "p", "here"], rows)


def combinations(name: str, metric: str) -> str:
    """Show every combination of a shared model and what makes it personal: held out; on the test; the best bold."""
    found: dict[str, dict[str, Configuration]] = {}
    for own in sweep(name).configurations:
        experiment = runs_of(own)[0].experiment
        first, *rest = (method for entry in experiment["algorithm"] for method in entry if method != "gpi")
        (loss,) = loss if isinstance(loss := experiment["local"]["loss"], dict) else [loss]
        prior = experiment["local"]["prior"]
        said = LOSSES[loss] if prior == "none" else f"{LOSSES[loss]} with {PRIORS[prior]}"
        found.setdefault(f"{METHODS[first]}{'' if first in OF_LOSS else f', {said}'}", {})[" ".join(rest)] = own
    held, tested = f"validation/{metric}", f"personal/{metric}"
    heads = [rest for rest in PERSONAL if any(rest in row for row in found.values())]
    best = max(mean(values) for row in found.values() for own in row.values() if (values := own.values(held)))
    rows = []
    for label, row in found.items():
        cells = [label]
        for rest in heads:
            own = row.get(rest)
            if own is None or not (values := own.values(held)):
                cells.append("")
                continue
            text = f"{100 * mean(values):.1f}; {100 * mean(own.values(tested)):.1f}"
            cells.append(f"**{text}**" if mean(values) == best else text)
        rows.append(cells)
    return grid(["", *(PERSONAL[rest] for rest in heads)], rows)


def gpi(name: str, trial: str) -> str:
    """Show what GPI finds of each class, and what it would find if an update told the shares exactly, over seeds."""
    rows = []
    for t in configuration(name, trial).trials:
        artifacts = RESULTS / name / "trials" / t["id"] / "artifacts"
        drawn = json.loads((artifacts / "1-gpi.proxy/portraits/gpi.json").read_text(encoding="utf-8"))["series"]
        with next(artifacts.glob("*/per_client_class.csv")).open(encoding="utf-8") as file:
            cells = [(int(r["client"]), int(r["class"]), int(r["train"])) for r in csv.DictReader(file)]
        classes = len(drawn["GPI"])
        counts = [[0] * classes for _ in range(1 + max(client for client, *_ in cells))]
        for client, c, n in cells:
            counts[client][c] = n
        exact = [0.0] * classes
        for (
            own
        ) in counts:  # a row of the classifier grows by what a class has beyond an even share; the rest is dropped
            above = [max(n / sum(own) - 1 / classes, 0) for n in own]
            exact = [e + sum(own) * a / sum(above) for e, a in zip(exact, above, strict=True)]
        true = [sum(column) for column in zip(*counts, strict=True)]
        found = [sum(true) * share for share in drawn["GPI"]]
        for label, values in ("images", true), ("exactly by eq. 7", exact), ("found", found):
            rows.append([f"{label}, seed {t['params']['seed']}", *(f"{v:.0f}" for v in values)])
    return grid(["class", *map(str, range(len(rows[0]) - 1))], rows)


def orders(name: str) -> str:
    """Show mIoU by classes a client and local epochs, and in brackets that of the classes alone, without background."""
    cells = {}
    for own in sweep(name).configurations:
        runs = runs_of(own)
        alone = mean(
            v for run in runs for line in run.per_class if line["test"] and (v := line["personal_iou"]) is not None
        )
        at = runs[0].experiment["data"]["classes_per_client"], runs[0].experiment["local"]["epochs"]
        cells[at] = f"{percent(own.values('personal/miou'))} ({100 * alone:.1f})"
    many, epochs = ([*dict.fromkeys(sorted(at[i] for at in cells))] for i in (0, 1))
    rows = [[f"{c} class{'es' * (c > 1)} a client", *(cells[c, e] for e in epochs)] for c in many]
    return grid(["`personal/miou` (foreground alone)", *(f"{e} epoch{'s' * (e > 1)}" for e in epochs)], rows)


def before(name: str, rows: Sequence[str], phase: str) -> str:
    """Show what cells of a table would be by the model before a phase, which is their last."""
    lines = []
    cells = [c for c in published(name)["cells"] if c["row"] in rows and c["values"]]
    columns = list(dict.fromkeys(c["column"] for c in cells))
    for row in rows:
        line = [row]
        for column in columns:
            trials = next((c["trials"] for c in cells if (c["row"], c["column"]) == (row, column)), [])
            logs = [history(RESULTS / name / "trials" / trial) for trial in trials]
            earlier = [extremes([line for line in log if line["phase"] != phase])[0] for log in logs]
            line.append(percent([last["personal/acc_dist"] for last in earlier]))
        lines.append(line)
    return grid(["", *(column.split(", ", 1)[1] for column in columns)], lines)


def one(reference: str, metric: str) -> str:
    """Show what one run has, SWEEP/TRIAL, or by the model of its phases that begin so, SWEEP/TRIAL@PHASE; or a dash."""
    place, _, phase = reference.partition("@")
    lines = history(RESULTS / place.replace("/", "/trials/")) if place else []
    last = extremes([line for line in lines if line["phase"].startswith(phase)])[0]
    return f"{100 * last[metric]:.1f}" if last else "-"


def of_mupfl() -> str:
    """Show readings of MuPFL's Table 2 at IF = 100, one seed: FedAvg's shared model, and four that are of clients."""
    rows = []
    for alpha, readings in MUPFL.items():
        cells = {c["row"]: c["published"] for c in published("mupfl_2")["cells"] if c["column"].endswith(alpha)}
        columns = "FedAvg", "FedProx", "Ditto", "FedRep", "MuPFL"
        rows.append([f"published, {alpha.split(', ')[-1]}", *(f"{cells[name]:.1f}" for name in columns)])
        for label, trials in readings.items():
            rows.append([label, *(one(trial, MIX) for trial in (f"{trials[0]}@fed", *trials))])
    heads = "FedAvg, shared", "after 10 more epochs (FedProx)", "Ditto", "FedRep", "MuPFL"
    return grid(["", *heads], rows)


def of_bpfed() -> str:
    """Show readings of BPFed's Tables 2 and 4 at IF = 50, β = 0.5, by `personal/acc_owned`, one seed."""
    printed = yaml.safe_load((RESULTS.parent / "search_spaces/tables/published.yaml").read_text(encoding="utf-8"))
    parts, others = printed["bpfed_4"]["rows"].values(), printed["bpfed_2"]["rows"]
    known = [others["FedAvg"][0], others["FedAFA"][0], others["FedPer"][0], *(row[0] for row in parts)]
    rows = [["published", *(f"{number:.1f}" for number in known), "-"]]
    rows += [[label, *(one(r, OWNED) for r in references)] for label, references in BPFED.items()]
    heads = "FedAvg", "FedAFA", "FedPer", "CE", "+ mixup", "+ features", "+ LS, all", "+ LS, owned", "LS without mixup"
    return grid(["", *heads], rows)


# What is shown where --------------------------------------------------------------------------------------------------

CIFAR10 = {
    "FedAvg": "0000",
    "FedPer": "0003",
    "BPFed, stage 2 with cross entropy alone": "0006",
    "… + mixup": "0009",
    "… + feature augmentation": "0012",
    "… + smoothing over all classes": "0015",
    "**BPFed** (… over owned classes)": "0018",
    "FedAvg, BSM with local counts": "0021",
    "FedAvg, BSM with the true global prior": "0024",
    "FedAvg, BSM with GPI": "0027",
    "**LDAE** with GPI": "0030",
    "FedAvg, BSM with GPI of at least 100 images a class": "0033",
    "**LDAE** with GPI of at least 100 images a class": "0034",
    "FedLoGe, ETF alone": "readings_fedloge/0033",
    "FedLoGe, SSE-C alone": "readings_fedloge/0024",
    "**FedLoGe** (SSE-C, GA-FR, LA-FR)": "readings_fedloge/0003",
    "FedAFA": "0054",
    "CReFF": "0057",
    "BalanceFL": "combinations-cifar10/0012",
}
COLUMNS = {
    "generic/acc": "`generic/acc`",
    "personal/acc_owned": "`personal/acc_owned`",
    "personal/acc_dist": "`personal/acc_dist`",
}
OWNED, GENERIC, MIX = "personal/acc_owned", "generic/acc", "personal/acc_dist"
CLAIMS: list[Claim] = [
    ("BPFed over FedPer", "0018", "0003", OWNED),
    ("BPFed over FedAvg", "0018", "0000", OWNED),
    ("BPFed over FedAFA", "0018", "0054", OWNED),
    ("BPFed over CReFF", "0018", "0057", OWNED),
    ("BPFed over BalanceFL", "0018", "combinations-cifar10/0012", OWNED),
    ("BPFed, Table 4: mixup helps", "0009", "0006", OWNED),
    ("… feature augmentation helps", "0012", "0009", OWNED),
    ("… smoothing over all classes helps", "0015", "0012", OWNED),
    ("… and more so over owned classes", "0018", "0015", OWNED),
    ("LDAE, Table 2: GPI serves BSM as well as the true prior", "0027", "0024", GENERIC),
    ("… GPI serves BSM better than local counts (by 0.1 points, as published)", "0027", "0021", GENERIC),
    ("… the same with GPI of at least 100 images a class", "0033", "0021", GENERIC),
    ("LDAE over BSM, both with GPI", "0030", "0027", GENERIC),
    ("… the same with GPI of at least 100 images a class", "0034", "0033", GENERIC),
    ("FedLoGe over FedAvg, generic model", "readings_fedloge/0003", "0000", GENERIC),
    ("FedLoGe over FedAvg, personal model", "readings_fedloge/0003", "0000", MIX),
    ("FedLoGe, Table 3: SSE-C over ETF", "readings_fedloge/0024", "readings_fedloge/0033", GENERIC),
    ("… GA-FR helps the generic model", "readings_fedloge/0003", "readings_fedloge/0024", GENERIC),
    ("… LA-FR helps the personal model", "readings_fedloge/0003", "readings_fedloge/0024", MIX),
    ("… on the classes that clients own", "readings_fedloge/0003", "readings_fedloge/0024", OWNED),
    ("… with its step of tuning, fifteen epochs", "readings_fedloge/0019", "readings_fedloge/0024", MIX),
]
SHORT: list[Claim] = [
    ("BPFed over FedPer", "0018", "0003", OWNED),
    ("BPFed's parts: mixup", "0009", "0006", OWNED),
    ("… feature augmentation", "0012", "0009", OWNED),
    ("… smoothing", "0018", "0012", OWNED),
    ("LDAE over BSM, both with GPI", "0030", "0027", GENERIC),
    ("… both with GPI of at least 100 images a class", "0034", "0033", GENERIC),
    ("GPI serves BSM as well as the true prior", "0027", "0024", GENERIC),
    ("FedLoGe over FedAvg, generic model", "readings_fedloge/0003", "0000", GENERIC),
    ("… personal model", "readings_fedloge/0003", "0000", MIX),
    ("FedLoGe's parts: SSE-C over ETF", "readings_fedloge/0024", "readings_fedloge/0033", GENERIC),
    ("… GA-FR, generic model", "readings_fedloge/0003", "readings_fedloge/0024", GENERIC),
    ("… LA-FR, personal model", "readings_fedloge/0003", "readings_fedloge/0024", MIX),
    ("… LA-FR and its step of tuning", "readings_fedloge/0019", "readings_fedloge/0024", MIX),
]
FEDLOGE = {
    "FedAvg": "cifar10/0000",
    "ETF alone": "0033",
    "ETF, realigned as in the text": "0027",
    "ETF, realigned, with the own head's logits": "0028",
    "SSE-C of norm 0.1 alone": "cifar10/0042",
    "SSE-C of norm 0.1, realigned as in the text": "0000",
    "SSE-C of norm 0.1, realigned as in the text, tuned": "0018",
    "SSE-C of norm 0.1, realigned, with the own head's logits": "0001",
    "SSE-C of norm 0.1, unit vectors realigned, with the own head's logits": "0012",
    "SSE-C of norm 1 alone": "0024",
    "SSE-C of norm 1, realigned as in the text": "0002",
    "SSE-C of norm 1, realigned as in the text, tuned": "0019",
    "**SSE-C of norm 1, realigned, with the own head's logits**": "0003",
    "SSE-C of norm 1, unit vectors realigned, with the own head's logits": "0013",
}
OF_FEDLOGE = {
    "generic/acc": "`generic/acc`",
    "personal/acc_dist": "`personal/acc_dist`",
    "validation/acc_dist": "held out, `acc_dist`",
    "personal/acc_owned": "`personal/acc_owned`",
}
PIXELS = {
    "personal/miou": "`personal/miou`",
    "personal/macc": "`personal/macc`",
    "generic/miou": "`generic/miou`",
    "generic/macc": "`generic/macc`",
    "validation/miou": "held out, `miou`",
}
CAMVID = {
    "Local, rate 0.03": "0002",
    "FedRep, rate 0.03": "0020",
    "Ditto, rate 0.01": "0012",
    "MuPFL, rate 0.03": "0026",
    "FedAvg, rate 0.01": "0006",
}
CAMVID_PARTS = {
    "FedAvg, then five epochs of each client's own": "0000",
    "MuPFL as above: BAVD zeroes activations below the mean of the map": "camvid/0026",
    "BAVD zeroes places of the map below its mean": "0004",
    "BAVD keeps the largest nine tenths of the places": "0006",
    "without BAVD": "0002",
    "without BAVD and PKCF": "0008",
}
OF_PARTS = {"personal/miou": "`personal/miou`", "validation/miou": "held out"}
#: By column of Table 2: FedAvg (or FedProx) with ten more epochs, Ditto, FedRep, MuPFL.
MUPFL = {
    "Fashion-MNIST, IF=100, α=0.5": {
        "`per_class`, no momentum: the table's": [f"mupfl_2/{t}" for t in ("0020", "0056", "0074", "0110")],
        "`per_class`, momentum 0.9": [f"readings_mupfl-full/{t}" for t in ("0005", "0006", "0007", "0008")],
        "`per_class_capped`, no momentum": [f"readings_mupfl-capped/{t}" for t in ("0000", "0001", "0002", "0003")],
        "`per_class_capped`, momentum 0.9": [f"readings_mupfl-capped/{t}" for t in ("0004", "0005", "0006", "0007")],
    },
    "Fashion-MNIST, IF=100, α=1.0": {
        "`per_class`, no momentum: the table's": [f"mupfl_2/{t}" for t in ("0023", "0059", "0077", "0113")],
        "`per_class_capped`, no momentum": [f"readings_mupfl-capped/{t}" for t in ("0008", "0009", "0010", "0011")],
        "`per_class_capped`, momentum 0.9": [f"readings_mupfl-capped/{t}" for t in ("0012", "0013", "0014", "0015")],
    },
}

#: FedAvg, FedAFA, FedPer, BPFed's five rows, BPFed without mixup; `@` the phase by whose model.
BPFED = {
    "`per_class`, crops and flips: the table's": [
        *(f"cifar10/{t}" for t in ("0000", "0054", "0003", "0006", "0009", "0012", "0015", "0018")),
        "",
    ],
    "`grouped_equal`, crops and flips": [
        "readings_bpfed/0016@fedavg",
        *(f"readings_bpfed/{t}" for t in ("0016", "0000", "0002", "0004", "0006", "0008", "0010", "0012")),
    ],
    "`grouped_equal`, images as they are": [
        "readings_bpfed/0018@fedavg",
        *(f"readings_bpfed/{t}" for t in ("0018", "0001", "0003", "0005", "0007", "0009", "0011", "0013")),
    ],
    "… and five local epochs instead of one": [
        "",
        "",
        *(f"readings_bpfed-longer/{t}" for t in ("0000", "0001", "0002", "0003", "0004", "0005", "0008")),
    ],
}

LOSSES = {"ce": "CE", "balanced_softmax": "BSM", "fedlc": "FedLC", "lade": "LADE"}
PRIORS = {"local": "own counts", "global": "true counts", "gpi": "GPI"}
METHODS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "balancefl": "BalanceFL",
    "mupfl": "**MuPFL**",
    "bpfed": "**BPFed**",
    "fedloge": "**FedLoGe**",
    "ldae": "**LDAE**",
}
OF_LOSS = "balancefl", "mupfl", "bpfed", "fedloge", "ldae"  # their loss is a part of them
PERSONAL = {
    "": "no more",
    "finetune": "fine-tuning",
    "lws": "LWS",
    "tau_norm": "τ-norm",
    "fedafa": "FedAFA",
    "ecl": "ECL",
}

TOLD = {
    "generic/acc": "`generic/acc`",
    "personal/acc_dist": "`personal/acc_dist`",
    "personal/acc_owned": "`personal/acc_owned`",
    "personal/acc_worst10": "`personal/acc_worst10`",
}
TOGETHER = {
    "BalanceFL, LWS": "0150",
    "FedAvg, BSM with own counts, LWS": "0054",
    "FedAvg, CE, fine-tuning": "0003",
    "**ECL** (FedAvg, CE, ECL)": "0015",
    "**LDAE**": "0132",
    "**FedLoGe**": "0135",
    "**BPFed**": "0138",
    "**MuPFL**": "0141",
    "FedAvg": "0000",
}
FIVE = {"ECL": "0015", "LDAE": "0132", "FedLoGe": "0135", "BPFed": "0138", "MuPFL": "0141"}
OVER_FIVE: list[Claim] = [
    *((f"LWS after BalanceFL over {name}", "0150", trial, OWNED) for name, trial in FIVE.items()),
    *((f"LWS after BSM over {name}", "0054", trial, OWNED) for name, trial in FIVE.items()),
    *((f"fine-tuned FedAvg over {name}", "0003", trial, MIX) for name, trial in FIVE.items()),
]
TOGETHER10 = {
    "BalanceFL, LWS": "0015",
    "FedAvg, BSM with own counts, LWS": "0003",
    "FedAvg, CE, fine-tuning": "0036",
    "**ECL** (FedAvg, CE, ECL)": "0033",
    "**LDAE** with GPI of at least 100 images a class": "cifar10/0034",
    "**FedLoGe**": "readings_fedloge/0003",
    "**BPFed**": "cifar10/0018",
    "**MuPFL**": "0048",
    "FedAvg": "0027",
}
FIVE10 = {
    "ECL": "0033",
    "LDAE": "cifar10/0034",
    "FedLoGe": "readings_fedloge/0003",
    "BPFed": "cifar10/0018",
    "MuPFL": "0048",
}
OVER_FIVE10: list[Claim] = [
    *((f"LWS after BalanceFL over {name}", "0015", trial, OWNED) for name, trial in FIVE10.items()),
    *((f"LWS after BSM over {name}", "0003", trial, OWNED) for name, trial in FIVE10.items()),
    *((f"fine-tuned FedAvg over {name}", "0036", trial, MIX) for name, trial in FIVE10.items()),
]

BLOCKS: dict[str, Callable[[], str]] = {
    "ecl_2": lambda: beside("ecl_2"),
    "ecl_2 duels": lambda: duels("ecl_2"),
    "ecl_2 masked duels": lambda: duels("ecl_2", "masked_duels"),
    "ecl_2 fingerprint": lambda: fingerprint("ecl_2"),
    "mupfl_2": lambda: beside("mupfl_2"),
    "mupfl_2 duels": lambda: duels("mupfl_2"),
    "mupfl_2 fingerprint": lambda: fingerprint("mupfl_2"),
    "mupfl_2 shared": lambda: before("mupfl_2", ["FedProx", "FedNova", "CReFF"], "finetune.tune"),
    "mupfl readings": of_mupfl,
    "camvid": lambda: means("camvid", CAMVID, PIXELS, seeds=2),
    "camvid parts": lambda: means("camvid_parts", CAMVID_PARTS, OF_PARTS, seeds=2),
    "camvid orders": lambda: orders("camvid_orders"),
    "cifar10": lambda: means("cifar10", CIFAR10, COLUMNS),
    "cifar10 fingerprint": lambda: fingerprint("cifar10"),
    "bpfed readings fingerprint": lambda: fingerprint("readings_bpfed"),
    "bpfed longer fingerprint": lambda: fingerprint("readings_bpfed-longer"),
    "combinations fingerprint": lambda: fingerprint("combinations"),
    "combinations masked": lambda: combinations("combinations", "acc_owned_masked"),
    "combinations owned": lambda: combinations("combinations", "acc_owned"),
    "results fashion": lambda: means("combinations", TOGETHER, TOLD),
    "results cifar10": lambda: means("combinations-cifar10", TOGETHER10, TOLD),
    "cifar10 combinations": lambda: combinations("combinations-cifar10", "acc_owned"),
    "cifar10 combinations masked": lambda: combinations("combinations-cifar10", "acc_owned_masked"),
    "cifar10 combinations claims": lambda: claims("combinations-cifar10", OVER_FIVE10),
    "cifar10 combinations fingerprint": lambda: fingerprint("combinations-cifar10"),
    "combinations claims": lambda: claims("combinations", OVER_FIVE),
    "fedloge readings": lambda: means("readings_fedloge", FEDLOGE, OF_FEDLOGE),
    "fedloge readings fingerprint": lambda: fingerprint("readings_fedloge"),
    "bpfed readings": of_bpfed,
    "cifar10 gpi": lambda: gpi("cifar10", "0027"),
    "cifar10 claims": lambda: claims("cifar10", CLAIMS),
    "cifar10 claims short": lambda: claims("cifar10", SHORT),
}


def written(document: str) -> str:
    """Return a document with its tables as they are today."""
    return BLOCK.sub(
        lambda found: f"{found[1]}{BLOCKS[found[2]]() if found[2] in BLOCKS else found[3]}{found[3]}", document
    )


if __name__ == "__main__":
    for path in DOCUMENTS:
        old = path.read_text(encoding="utf-8")
        if old != (new := written(old)):
            path.write_text(new, encoding="utf-8")
            sys.stdout.write(f"written again: {path.relative_to(RESULTS.parent)}\n")
