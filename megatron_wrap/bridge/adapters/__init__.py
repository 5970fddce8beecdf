"""What a run trains: adapters of peft, their folders, and the parameters that `train.freeze` leaves."""
