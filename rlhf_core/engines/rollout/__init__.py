"""Engines that sample: their requests, PyTorch's engine, and engines in processes of their own."""
