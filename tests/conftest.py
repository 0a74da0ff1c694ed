"""What holds for every test."""

from hypothesis import settings

# Times are the benchmarks'; a loaded machine is no failure.
settings.register_profile("kvloom", deadline=None)
settings.load_profile("kvloom")
