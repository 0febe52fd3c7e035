"""Requests of every route, with a grid of parameters, for the test that compares the browser's answers with Python's."""

from collections.abc import Iterator
from typing import Any

from handgrad.explain_page.session.session import Session

Request = tuple[str, dict[str, Any]]
OTHER = "to bo or not"
OBJECTIVES: list[dict[str, Any]] = [
    {},
    {"kind": "position", "position": 6},
    {"kind": "difference", "position": 4, "against": "r"},
    {"kind": "difference", "position": 12, "token": 3, "against": 5},
]


def sentences(text: str) -> list[Request]:
    """The first requests: the answer to number k has the id "@k"."""
    return [
        *(("sentence", {"text": text, "objective": objective}) for objective in OBJECTIVES),
        ("sentence", {"text": OTHER}),
        ("step", {"id": "@0", "lr": 0.05}),
        ("step", {"id": "@5", "lr": 0.01, "optimizer": "Adam"}),
        ("step", {"id": "@6", "lr": 0.02, "optimizer": "Adam"}),
        ("step", {"id": "@2", "lr": 0.05}),
        ("step", {"id": "@0", "lr": 60.0}),
        ("step", {"id": "@0", "lr": 1000.5}),
        ("step", {"id": "@0", "lr": 0.1, "optimizer": "Muon"}),
        ("sentence", {"text": "to? be or not"}),  # the first character surprises most: another one is attributed
        ("sentence", {"text": "tot"}),  # its characters attend to the first with more than 30 %
        ("sentence", {"text": "be or to be, not?"}),  # what is equal is elsewhere
        ("sentence", {"text": "to, be? o not"}),  # as long as the first, with a character more and one less
    ]


def requests(session: Session, text: str) -> list[Request]:
    """Every request, those of `sentences` first."""
    config = session.model.config
    found: list[Request] = [*sentences(text), ("table", {}), ("learn", {}), ("predict", {"text": text[:7]})]
    found += [("predict", {"text": text, "version": 1}), ("token", {"text": "be"})]
    found += [("overview", {"id": id}) for id in ("@1", "@2", "@7")]
    found += [("station", {"id": id, "station": station}) for id, station in OF_OTHERS]
    found += [(name, {"id": "@0"}) for name in ("overview", "flow", "heads", "effects")]
    found += [("station", {"id": "@0", "station": s.id}) for s in session.stations]
    found += [("lens", {"id": "@0", "station": s.id}) for s in session.stations if s.stream]
    found += [("lens", {"id": "@2", "station": "blocks.0.a_5"}), ("head", {"id": "@2", "block": 0, "head": 1})]
    for b in range(config.n_blocks):
        found += [("head", {"id": "@0", "block": b, "head": h}) for h in range(config.n_heads)]
        found += [("neurons", {"id": "@0", "block": b}), ("neurons", {"id": "@2", "block": b, "position": 4})]
    for id in ("@0", "@2"):
        found += [("swaps", {"id": id, "position": t}) for t in (0, 5)]
        found += [
            ("what-if", {"id": id, "block": 0, **part, "error": error}) for part in PARTS for error in (False, True)
        ]
        found += [("compare", {"id": id, "other": other}) for other in ("@4", "@5")]
    for station in ("a_1", "blocks.0.a_3", "a_12", "loss"):
        found.append(("compare", {"id": "@0", "other": "@4", "station": station}))
    found += patches(config.n_blocks - 1)
    found += [("follow", {"id": id, **cell}) for id in ("@0", "@2") for cell in cells(session, id)]
    for name, head in (("y_pred", None), ("sum_e", None), ("blocks.0.rho", 0), ("blocks.0.sum_e", 0)):
        found.append(("follow", {"id": "@9", "name": name, "row": 2, "column": 0, "head": head}))
    for given in ATTRIBUTIONS:
        found.append(("attribution", {"id": "@0", "steps": 3, **given}))
    found += [("attribution", {"id": id, "steps": 3}) for id in ("@1", "@2")]
    found += [("attribution", {"id": "@12", "steps": 3}), ("head", {"id": "@13", "block": 0, "head": 0})]
    found.append(("station", {"id": "@13", "station": "loss"}))
    for name in ("a_0", "blocks.0.a_8", "delta_12", "delta_0", "swaps", "grad_w_10"):
        rows = "0:1" if name in ("a_0", "grad_w_10") else "2:9"
        found += [(route, {"id": "@1", "name": name, "rows": rows, "columns": "3:11"}) for route in ("slice", "value")]
        found.append(("matrix", {"id": "@1", "name": name}))
    for name in ("rho", "sent", "q", "delta_raw"):
        which = {"id": "@0", "name": f"blocks.0.{name}", "head": 1}
        found += [("value", {**which, "rows": "1:5", "columns": "0:4"}), ("matrix", {**which, "rows": "2,0"})]
    for which in ({"name": "blocks.0.w_6"}, {"name": "blocks.0.score", "head": 1}, {"name": "blocks.0.G_1"}):
        found.append(("slice", {"id": "@0", **which}))
    return found + list(mistakes(session, text))


def patches(block: int) -> Iterator[Request]:
    """Of every kind, from sentences of equal and of different length and from other weights, for every objective."""
    for of in PATCHED:
        for id, other in (("@0", "@4"), ("@2", "@12"), ("@3", "@15")):
            yield "patch-map", {"id": id, "other": other, "of": of}
        for at in ({}, {"position": 5}):
            yield "patch", {"id": "@0", "other": "@4", "of": of, "block": block, **at}
            yield "patch", {"id": "@2", "other": "@12", "of": of, "block": 0, **at}
    for id, other in PAIRS:
        yield "patch-map", {"id": id, "other": other}
        for at in ({}, {"position": 2}, {"head": 1}, {"head": 0, "position": 1}):
            yield "patch", {"id": id, "other": other, "block": block, **at}


OF_OTHERS = [
    ("@1", "loss"),
    ("@1", "a_1"),
    ("@2", "loss"),
    ("@2", "a_0"),
    ("@2", "blocks.0.a_7"),
    ("@3", "loss"),
    ("@7", "a_12"),
    ("@2", "blocks.0.a_3"),
    ("@3", "a_11"),
    ("@13", "blocks.0.a_3"),
    ("@9", "blocks.0.a_3"),  # after a step so large that softmax shifts its rows
]
PARTS: list[dict[str, Any]] = [
    {"kind": "head", "head": 1},
    {"kind": "skip", "edge": "5"},
    {"kind": "skip", "edge": "10"},
    {"kind": "neuron", "neuron": 7},
    {"kind": "weight", "head": 0, "row": 4, "column": 2},
]
PATCHED = ("a_3", "a_1", "a_5", "a_4", "a_9")
PAIRS = [("@0", "@5"), ("@0", "@0"), ("@1", "@14"), ("@14", "@1"), ("@0", "@15"), ("@13", "@3"), ("@15", "@0")]
ATTRIBUTIONS: list[dict[str, Any]] = [
    {},
    {"position": 3},
    {"position": 0},
    {"position": 12, "word": 2},
    {"position": 5, "word": 4, "against": 8},
]


def cells(session: Session, id: str) -> Iterator[dict[str, Any]]:
    """Cells to follow: of every signal and parameter, and of what the trace does not record."""
    yield from ({"name": name, "row": 0, "column": c} for name in ("a_0", "delta_0", "y_pred") for c in (0, 5))
    last = f"blocks.{session.model.config.n_blocks - 1}."
    for station in session.stations[1:]:
        for name in dict.fromkeys([*station.a, *station.incoming]):
            yield from ({"name": name, "row": row, "column": 4} for row in (3, 12))
        for p in station.parameters:
            vector = session.model.get_parameter(p.name).ndim == 1
            yield {"name": p.gradient, "row": 0 if vector else 5, "column": 6}
    for name in ("q", "k", "v", "rho", "delta_causal", "delta_raw", "delta_q", "delta_k", "delta_v", "score"):
        yield {"name": last + name, "row": 5, "column": 2, "head": 1}
    yield {"name": last + "sum_e", "row": 5, "column": 0, "head": 1}
    for name in ("mu_1", "sigma_5", "mean_G_1", "mean_Ga_5", "G_5"):
        yield {"name": last + name, "row": 5, "column": 0}
    yield from ({"name": name, "row": 4, "column": 0} for name in ("sum_e", "G_10"))
    yield from ({"name": name, "row": 2, "column": 3} for name in (last + "a_bar_5", last + "w_6", "w_tok", "w_11"))


def mistakes(session: Session, text: str) -> Iterator[Request]:
    """Requests that are refused, with the same message on both sides."""
    yield "sentence", {"text": "x"}
    yield "sentence", {"text": "to be " * 20}
    yield "sentence", {"text": "Ω is unknown"}
    yield "sentence", {"text": "to \ud800"}
    yield "sentence", {"text": "to be " * 700}
    yield "sentence", {"text": text, "objective": {"kind": "word"}}
    yield "sentence", {"text": text, "objective": {"kind": "position"}}
    yield "sentence", {"text": text, "objective": {"kind": "position", "position": 12}}
    yield "sentence", {"text": text, "objective": {"kind": "difference", "position": 3}}
    yield "sentence", {"text": text, "objective": {"kind": "difference", "position": 40, "against": 3}}
    yield "sentence", {"text": text, "objective": {"kind": "difference", "position": 3, "token": 3, "against": 3}}
    yield "token", {"text": ""}
    for station in ("a_99", "blocks.0.a_6"):
        yield "lens", {"id": "@0", "station": station}
    for name, given in (
        ("head", {"block": 0, "head": 9}), ("neurons", {"block": 7}), ("neurons", {"block": 0, "position": 50}),
        ("swaps", {"position": 13}), ("what-if", {"kind": "word", "block": 0}), ("attribution", {"position": 12}),
        ("what-if", {"kind": "head", "block": 5, "head": 0}), ("what-if", {"kind": "head", "block": 0}),
        ("what-if", {"kind": "skip", "block": 0, "edge": "7"}), ("attribution", {"position": 90}),
        ("attribution", {"steps": 999}), ("follow", {"name": "a_99", "row": 0, "column": 0}),
        ("follow", {"name": "blocks.0.rho", "row": 0, "column": 0}), ("follow", {"name": "a_11", "row": 99, "column": 0}),
        ("value", {"name": "a_11", "rows": "0:x", "columns": "0:3"}), ("matrix", {"name": "a_99"}),
        ("value", {"name": "a_11", "rows": "80:90", "columns": "0:3"}), ("matrix", {"name": "a_11", "rows": "0,99"}),
        ("slice", {"name": "a_11", "rows": "0:3", "columns": "5:2"}), ("matrix", {"name": "a_11", "rows": "x"}),
        ("matrix", {"name": "blocks.0.rho"}), ("matrix", {"name": "blocks.9.sent"}), ("slice", {"name": "w_99"}),
        ("slice", {"name": "blocks.0.G_7"}), ("slice", {"name": "blocks.9.score"}), ("slice", {"name": "score"}),
        ("slice", {"name": "blocks.0.sum_e"}), ("follow", {"name": "b_99", "row": 0, "column": 0}),
        ("patch-map", {"other": "@4", "of": "a_2"}),
        ("patch", {"other": "@4", "block": 7}), ("patch", {"other": "@4", "block": 0, "of": "skip_5"}),
        ("patch", {"other": "@4", "block": 0, "head": 9}), ("patch", {"other": "@4", "block": 0, "of": "a_5", "head": 0}),
        ("patch", {"other": "@5", "block": 0, "position": 13}), ("patch", {"other": "@13", "block": 0, "position": 12}),
        ("patch", {"other": "@13", "block": 0, "position": 1}), ("patch", {"other": "@4", "block": -1}),
    ):  # fmt: skip
        yield name, {"id": "@0", **given}
