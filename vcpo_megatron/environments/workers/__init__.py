"""Worker processes that environments run in, so that a user's code cannot hang, kill or silence a run.

pool       the run's end: starts workers, spreads episodes over them, replaces those that die or hang
worker     one process as its parent sees it
__main__   the process: makes the environment, serves many episodes on an event loop of its own
host       what runs there: the boundary around a user's code, deadlines, what a failure says
values     what a user's code gives back is checked before it leaves
messages   how both ends talk: one request and one reply a turn
activity   which call a worker is in, in memory that its parent reads even when it hangs or has died
"""
