"""RL-Zoo's training script with SQL and CBSQL among its algorithms.

python examples/rl_zoo/train.py --algo cbsql --env CartPole-v1 --conf-file examples/rl_zoo/cbsql.yml
"""

import rl_zoo3
from rl_zoo3.train import train

from cbsql import CBSQL, SQL

rl_zoo3.ALGOS.update(sql=SQL, cbsql=CBSQL)

if __name__ == "__main__":
    train()
