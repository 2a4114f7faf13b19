"""What a measurement asks an NVIDIA GPU."""

import warnings

import torch

# Operations of one multiprocessor in one cycle with dense 16-bit matrix instructions, by compute capability (NVIDIA's white papers).
_MATRIX_OPERATIONS = {
    "8.0": 2048,
    "8.6": 1024,
    "8.7": 2048,
    "8.9": 1024,
    "9.0": 4096,
    "10.0": 8192,
    "10.3": 8192,
    "12.0": 2048,
}
_BY_ELEMENT_SIZE = {1: 2.0, 2: 1.0, 4: 0.5, 8: 0.0625}  # of that rate: 8-bit, 16-bit, TF32, float64


class NvidiaClock:
    """See `opjit.backends.Clock`."""

    def cache_bytes(self) -> int:
        return int(torch.cuda.get_device_properties().L2_cache_size)

    def megahertz(self) -> int | None:
        """Read the clock of the multiprocessors, or return None without NVML (`pip install nvidia-ml-py`)."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return int(torch.cuda.clock_rate())
            except Exception:  # no module, no library, no permission
                return None

    def peaks(self, element_size: int) -> tuple[float, float]:
        """Return memory clock times bus width, and the rate of matrix instructions at the highest clock."""
        gpu = torch.cuda.get_device_properties()
        bandwidth = 2e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8
        in_a_cycle = (
            _MATRIX_OPERATIONS.get(f"{gpu.major}.{gpu.minor}", 0) * gpu.multi_processor_count
        )
        return bandwidth, 1e3 * gpu.clock_rate * in_a_cycle * _BY_ELEMENT_SIZE.get(
            element_size, 2.0
        )

    def model(self, index: int | None = None) -> str:
        return torch.cuda.get_device_name(index)
