"""What bounds a GPU: bytes of memory and bfloat16 operations a second.

    from workbench.roofline import device

    device("NVIDIA H200").bytes_per_second  # 4.3e12

Every roofline takes them from here, that of hardware counters and that of the module map.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What bounds a device.

    Attributes:
        name: as the driver says it.
        bytes_per_second: of its memory. flops: dense bfloat16 operations a second.
        source: where the two are from.
    """

    name: str
    bytes_per_second: float
    flops: float
    source: str = ""


# A data sheet's figure is one that no kernel reaches; where there is a measured one, it is taken. The H200's data sheet
# says 4.8e12 and 989e12.
H200 = Device("NVIDIA H200", 4.3e12, 790e12, "measured: a copy on the device; a matrix product of 8192 cubed")
_DEVICES = (
    H200,
    Device("NVIDIA H100 80GB HBM3", 3.35e12, 989e12, "NVIDIA's data sheet"),
    Device("NVIDIA A100-SXM4-80GB", 2.039e12, 312e12, "NVIDIA's data sheet"),
)


def device(gpu: str) -> Device | None:
    """Return what bounds the GPU of this name; None for one that is not known."""
    return next((one for one in _DEVICES if one.name == gpu), None)
