"""How an update will change the policy's entropy: predicted, and verified, within the memory of a microbatch.

The entropy of completions y of a prompt x at sampling temperature t, in nats per sequence:

    H(theta) = E_x E_{y ~ pi(.|x)} [ -S ],   S = sum_t log pi(y_t | x, y_<t)

(end-of-sequence counts as a token, padding does not). A step ``theta + eta v`` changes it, to first order, by
``eta grad H . v``. Here grad H is estimated from samples, with error bars, and compared with the true change.
"""
