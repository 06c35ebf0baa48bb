"""Run the processes of a plan on this machine, show what they print, and end all of them whatever happens."""
