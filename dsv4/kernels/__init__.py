"""GPU kernels with thin launchers: tensors in and out, nothing allocated, no state. Knows no model."""
