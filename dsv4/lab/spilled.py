"""What `dsv4 plan` says of experts that lie in host memory."""

from typing import TYPE_CHECKING, Any

from dsv4.lab.gpus import HOST_BANDWIDTH, HOST_MEASURED_ON

if TYPE_CHECKING:
    from dsv4.lab.plan import Plan


def spill_figures(made: "Plan") -> dict[str, Any]:
    """What lies in host memory and what that costs."""
    spill = made.spill
    assert spill is not None
    rates = {"one": made.spilled_rate(1), "batch": made.spilled_rate(made.wanted.batch)}
    return {
        **{"experts": spill.num_spilled, "host_bytes": spill.host_bytes, "resident_share": spill.share},
        **{"host_bandwidth": HOST_BANDWIDTH, "host_bandwidth_measured_on": HOST_MEASURED_ON},
        "tokens_per_second_uniform": rates,
    }
