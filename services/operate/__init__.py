"""The commands of the command line. They import what they need as they run, never before."""
