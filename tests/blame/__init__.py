"""Jobs with a fault at a random moment: is the right process named, and does everything end in time?"""
