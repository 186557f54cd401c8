"""Use, memory, temperature and power of this machine's processor, accelerators and battery, read when asked.

``DeviceSampler.sample`` returns a ``MachineReading``. Each source has a pure parser. What a machine cannot
tell is None, never zero.
"""

from barnraise.core.devices.sample import BatterySample, DeviceSample, MachineReading
from barnraise.core.devices.sampler import DeviceSampler

__all__ = ["BatterySample", "DeviceSample", "DeviceSampler", "MachineReading"]
