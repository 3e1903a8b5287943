"""Smoke tests: eight small trainings that check a place where training is to run, criterion by criterion.

records.py    a test, its criteria and figures; what became of them
evidence.py   a run folder as one frozen record
judging.py    criteria on evidence (pure), and what a run that broke off leaves undecided
criteria/     the criteria that several tests share
figures.py    the notes' figures beside ours, by one definition
sizes.py      what fits this machine, and what was made smaller for it
places.py     this machine, a Slurm, or the cluster in a box
ladder/       one file a test
climb.py      runs tests through `launch.runs`
report.py     the table, smoke.json and the page
"""
