"""Devices: the dtype that suits one, threads that wait, free memory."""
