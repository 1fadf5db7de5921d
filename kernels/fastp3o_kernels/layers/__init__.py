"""What lies between a transformer's matrix products and its attention, one kernel each way: RMS
norms with the residual stream, rotary positions, and gates.

    norm.py, norm_kernel.py      RMSNorm; with the sum before it, or with the sum behind it
    rotary.py, rotary_kernel.py  queries and keys turned by their positions
    gate.py, gate_kernel.py      SwiGLU and GeGLU
"""

from fastp3o_kernels.layers.gate import ACTIVATIONS, gated
from fastp3o_kernels.layers.norm import NormKind, add_and_norm, norm_and_add, rms_norm
from fastp3o_kernels.layers.rotary import rotate

__all__ = ["ACTIVATIONS", "NormKind", "add_and_norm", "gated", "norm_and_add", "rms_norm", "rotate"]
