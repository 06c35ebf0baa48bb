"""Train on handwritten digits: hvd_mnist.py by the name that Horovod's page on MXNet gives it.

mpirun -np 2 -H localhost:2 -bind-to none -map-by slot python mxnet_mnist.py
"""

from hvd_mnist import main

if __name__ == "__main__":
    main()
