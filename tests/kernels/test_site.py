"""One hyper-connection site in one launch, against the reference's post, pre and norm."""

import pytest
import torch

from dsv4.kernels.site import Site
from dsv4.ops.mhc import ref as mhc
from dsv4.ops.norm import ref as norm

pytestmark = pytest.mark.gpu
EPS = 1e-6


@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d,rows,parts", [(96, 1, 2), (256, 3, 7), (4096, 2, 1), (4100, 1, 3), (7168, 2, 7)])
@pytest.mark.parametrize("form", ["first", "middle", "head"])
def test_site(act: torch.dtype, d: int, rows: int, parts: int, form: str) -> None:
    torch.manual_seed(d + rows)
    make = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    mixes = 4 if form == "head" else 24
    streams, fn = make(rows, 4, d).to(act), make(mixes, 4 * d) * (4 * d) ** -0.5
    base, scale, weight = make(mixes), make(mixes), make(d)
    gate, comb = make(rows, 4).sigmoid(), make(rows, 4, 4).softmax(-1)
    y = None if form == "first" else make(rows, parts, d).to(act if parts == 7 else torch.float32)
    want = streams
    if y is not None:
        total = torch.zeros(rows, d, device="cuda")
        for part in range(parts):
            total = total + y[:, part].float()
        want = mhc.post(total.to(act), streams, gate, comb)
    fn_t = fn.t().contiguous()
    if form == "head":
        x = mhc.head(want, fn_t, base, scale, EPS, EPS)
        new_gate, new_comb = gate.clone(), comb.clone()
    else:
        x, new_gate, new_comb = mhc.pre(want, fn_t, base, scale, EPS, EPS, 20)
    x = norm.rms_norm(x, weight, EPS)
    out = torch.full((rows, d), torch.nan, device="cuda", dtype=act)
    got, got_gate, got_comb = streams.clone(), gate.clone(), comb.clone()
    Site(y, got_gate, got_comb, got, fn, base, scale, weight, out, EPS, EPS, 20).launch()
    close = {"rtol": 1e-4, "atol": 1e-5} if act == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got, want, **close)  # type: ignore[arg-type]
    torch.testing.assert_close(got_gate, new_gate, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(got_comb, new_comb, rtol=2e-3, atol=2e-4)
    torch.testing.assert_close(out, x, **close)  # type: ignore[arg-type]


def test_rows_do_not_see_each_other() -> None:
    torch.manual_seed(1)
    d, rows = 4096, 5
    streams = torch.randn(rows, 4, d, device="cuda", dtype=torch.bfloat16)
    y = torch.randn(rows, 2, d, device="cuda")
    fn, base, scale = (
        torch.randn(24, 4 * d, device="cuda") / 128,
        torch.randn(24).cuda(),
        torch.randn(24).cuda(),
    )
    weight, gate, comb = torch.randn(d).cuda(), torch.rand(rows, 4).cuda(), torch.rand(rows, 4, 4).cuda()

    def run(pick: slice) -> list[torch.Tensor]:
        own = [t[pick].clone() for t in (streams, gate, comb)]
        x = torch.empty(own[0].shape[0], d, device="cuda", dtype=torch.bfloat16)
        Site(y[pick].clone(), own[1], own[2], own[0], fn, base, scale, weight, x, EPS, EPS, 20).launch()
        return [*own, x]

    together = run(slice(0, rows))
    for row in range(rows):
        for a, b in zip(run(slice(row, row + 1)), together, strict=True):
            assert torch.equal(a[0], b[row])
