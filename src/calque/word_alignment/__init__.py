"""Word alignment: neural, statistical and hybrid aligners and the jobs that use them."""
