"""Commands for an op's author: new, bench, wheel and demo."""
