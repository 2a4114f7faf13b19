"""Modules whose tests are not in the file of their name, and where these are:

bench: judge/test_judge.py
burst: judge/test_judge.py
child: judge/test_judge.py
command: judge/test_judge.py
launch: judge/test_judge.py
referee: judge/test_judge.py
sandbox: judge/test_judge.py
scheduler: judge/test_judge.py
screen: judge/test_judge.py
task: judge/test_judge.py
verdict: judge/test_judge.py
wire: judge/test_judge.py
zygote: judge/test_judge.py
"""
