"""Smoke tests: eight small trainings that check an installation, with explicit criteria.

records.py                 tests, criteria, figures and results; evaluation of criteria
evidence.py                a run folder as one frozen record
criteria.py                criteria that several tests share
figures.py                 measured figures beside those of the field notes; sizes that fit this machine
mlp_tests.py               tests 01 to 04
language_model_tests.py    tests 05 to 08
registry.py                the list of tests
runner.py                  runs the tests on this machine, through Slurm, or in the cluster in a box
report.py                  the table, smoke.json and the page
"""
