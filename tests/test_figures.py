"""Pictures that algorithms give of themselves: what they keep, and that they survive the way through a file."""

import json

import pytest
import torch

from algorithms.pictures import Bars, Heatmap, Lines, Points, from_json

AXES = {"title": "T", "x": "class", "y": "norm", "note": "Fig. 1"}
PICTURES = [
    Heatmap(**AXES, rows=["0", "1"], columns=["a"], values=torch.tensor([[1.0], [float("nan")]]), colour="cosine"),
    Lines(**AXES, at=[0, 1], series={"body": torch.tensor([1, 2])}),
    Bars(**AXES, groups=["many", "few"], series={"head": [0.5, None]}),
    Points(**AXES, series={"client 1": torch.eye(2)}),
]


@pytest.mark.parametrize("picture", PICTURES, ids=lambda p: type(p).__name__)
def test_a_picture_survives_its_file(picture):
    written = json.dumps(picture.to_json(), allow_nan=False)
    assert from_json(json.loads(written)) == picture


def test_tensors_become_lists_and_what_is_not_finite_becomes_none():
    assert PICTURES[0].values == [[1.0], [None]]
    assert PICTURES[3].series == {"client 1": [[1.0, 0.0], [0.0, 1.0]]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "Pie"}, "one of Heatmap, Lines, Bars, Points"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"series": {"a": [1.0]}}, "expected 2 values"),
        ({"series": {"a": [1.0, "x"]}}, "'x' is not a number"),
        ({"series": [1.0]}, "not a Bars"),
    ],
)
def test_a_damaged_picture_is_refused_with_the_reason(change, reason):
    with pytest.raises(ValueError, match=reason):
        from_json(PICTURES[2].to_json() | change)
