import pickle

import pytest
import torch
from torch import nn

from algorithms.base import State, Sum
from algorithms.params import Params


def model() -> Params:
    net = nn.Module()
    net.body = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    net.head = nn.Linear(3, 2)
    return Params.of(net)


def test_names_are_views_of_one_vector():
    w = model()
    assert w.flat.shape == (2 * 3 + 3 + 3 + 3 + 3 * 2 + 2,)
    assert w.buffers.shape == (6,)
    assert list(w)[:2] == ["body.0.weight", "body.0.bias"]
    w.flat[0] = 42.0
    assert w["body.0.weight"][0, 0] == 42.0
    assert w["body.1.running_var"].tolist() == [1.0, 1.0, 1.0]
    assert "body.1.num_batches_tracked" not in w


def test_arithmetic_acts_on_weights_and_buffers():
    a, b = model(), model()
    mean = (1 * a + 3 * b) / 4
    torch.testing.assert_close(mean.flat, a.flat / 4 + b.flat * 0.75)
    torch.testing.assert_close(mean.buffers, a.buffers)
    assert (a - a).norm() == 0
    assert (-a).dot(a) == pytest.approx(-(float(a.norm()) ** 2), rel=1e-5)


def test_the_inner_product_leaves_buffers_out():
    a = model()
    assert a.zeros().dot(a) == 0
    a.buffers += 100
    assert a.dot(a) == pytest.approx(float((a.flat**2).sum()))


def test_parts_and_joins():
    a, b = model(), model()
    assert a.body.flat.data_ptr() == a.flat.data_ptr()
    assert list(a.head) == ["head.weight", "head.bias"]
    joined = a | b.head
    assert joined["head.weight"] is b.head["head.weight"] or torch.equal(joined["head.weight"], b["head.weight"])
    assert torch.equal(joined["body.0.weight"], a["body.0.weight"])
    replaced = a.replace(b.head)
    assert torch.equal(replaced.head.flat, b.head.flat)
    assert torch.equal(replaced.body.flat, a.body.flat)
    scattered = a.where(lambda name: name.endswith("weight"))
    assert list(scattered) == ["body.0.weight", "body.1.weight", "head.weight"]
    assert torch.equal(scattered["head.weight"], a["head.weight"])
    assert len(a.under("nothing.")) == 0


def test_gradients_reach_the_vector_through_views_and_parts():
    w = model()
    flat = w.flat.clone().requires_grad_()
    live = Params(w.layout, flat, w.buffers)
    loss = (live["head.weight"] ** 2).sum() + live.body.dot(live.body) / 2
    (grad,) = torch.autograd.grad(loss, [flat])
    got = Params(w.layout, grad, w.buffers)
    torch.testing.assert_close(got["head.weight"], 2 * w["head.weight"])
    torch.testing.assert_close(got.body.flat, w.body.flat)
    assert got["head.bias"].abs().sum() == 0


def test_different_layouts_do_not_add():
    with pytest.raises(ValueError, match="different tensors"):
        model() + model().head


def test_pickled_as_plain_arrays():
    w = model()
    again = pickle.loads(pickle.dumps(w))
    assert again == w
    assert again != w * 2


def test_a_state_refuses_what_was_not_declared():
    state = State({"model": 1})
    state.model = 2
    assert state.model == 2
    with pytest.raises(AttributeError, match="no field 'modle' was declared; declared: model"):
        state.modle = 3
    with pytest.raises(AttributeError, match="declared: model"):
        _ = state.other


def test_sums_add_every_term_in_double_precision():
    tenth = torch.tensor([0.1])
    total = Sum(n=1, w=tenth, by_class={3: tenth})
    for _ in range(2):
        total = total + Sum(n=2, w=tenth, by_class={4: tenth})
    assert total.n == 5
    assert total.w.dtype == torch.float64
    assert float(total.w) == 3 * float(tenth.double())
    assert {k: float(v) for k, v in total.by_class.items()} == {3: float(tenth), 4: 2 * float(tenth.double())}
    with pytest.raises(ValueError, match="different terms"):
        _ = Sum(a=1) + Sum(b=1)
    with pytest.raises(AttributeError, match="no term 'x'; they sent: n, w"):
        _ = Sum(n=1, w=2).x
