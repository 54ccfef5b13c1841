"""What the binaries share: flags, inputs, runs that resume, statistics, tables and plots."""
