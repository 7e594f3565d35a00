from vitmnist.cli.main import main

main()
