"""Workers that Slurm starts: ``--launcher slurm``. Runs on the master.

Where the command runs decides how the workers start:

- In a task of ``srun``, all tasks run the same command. The task with rank 0 is the master.
- In the shell of ``salloc`` or in the script of ``sbatch``, this process is the master, and each worker is a step of the job.
- Elsewhere, as on a login node, this process is the master, and the workers are an array job. Element 2 has place 2, and
  Slurm queues it again if its node fails or if another job takes its node.

The token never reaches a job's record. A task reads it from a file of its owner, and so does an element of an array.
A step reads it from standard input.
"""
