"""--quick: for binaries that have a small version of themselves."""

from absl import flags

QUICK = flags.DEFINE_bool("quick", False, "A few settings on fewer tokens: a look in two minutes, and no proof.")
