"""The steps of gpu_check.py, each a module that runs by itself: `python -m gpu_steps.NAME --device cuda`."""
