"""The engine on a virtual clock: to plan capacity from a trace (`simulate`), and to look for faults (`fuzz`)."""
